"""What an export takes of memory beside the model, measured in processes of their own."""

import json
import subprocess
import sys

import pytest

_MEASURE = """
import json, resource, sys
import torch
from torch import nn
import aotexport

class Net(nn.Module):
    def __init__(self, rows, copies):
        super().__init__()
        self.table = nn.Parameter(torch.zeros(4 * rows, 1024))
        self.layers = nn.ModuleList(nn.Linear(1024, rows, bias=False) for _ in range(copies))

    def forward(self, x):
        return sum(layer(x).sum() for layer in self.layers) + self.table[:2].sum()

def memory(name):
    # Not `ru_maxrss`, which begins with that of the process before `exec`.
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(name)) * 1024

def export(name, *sizes):
    model = Net(*sizes)
    before = memory("VmRSS")
    aotexport.export(model, (torch.ones(2, 1024),), output=f"{sys.argv[1]}/{name}", programs=sys.argv[2].split(","))
    child = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
    return before, child, sum(p.nbytes for p in model.parameters())

_, small_child, _ = export("small", 1, 1)
before, child, weights = export("large", 8192, 4)
growth = {"export": memory("VmHWM") - before, "fresh process": child - small_child}
print(json.dumps({name: nbytes / weights for name, nbytes in growth.items()}))
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads the resident memory of Linux")
@pytest.mark.parametrize(
    ("programs", "most"),
    [("infer", {"export": 0.3, "fresh process": 1.3}), ("train,infer", {"export": 1.3, "fresh process": 2.3})],
    ids=["infer", "train_and_infer"],
)
def test_export_takes_no_more_memory_than_gradients_beside_the_model(tmp_path, programs, most):
    """The weights are 256 MiB, one tensor half of them; the fresh process maps them, which counts as its memory."""
    command = [sys.executable, "-c", _MEASURE, str(tmp_path), programs]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    growth = json.loads(run.stdout.splitlines()[-1])
    assert {name: part for name, part in growth.items() if part > most[name]} == {}
