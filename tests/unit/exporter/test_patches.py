"""Patches of Python and torch: undone on every exit, unseen by other threads. `tests/conftest.py` reads reasons."""

import signal
import threading

import pytest
import torch
from torch import nn

import aotexport
from aotexport.process import patches
from aotexport.process.patches import Patch, patched
from tests.forked import run_script


class Owner:
    def method(self):
        return "original"

    @property
    def value(self):
        return "original"


def in_another_thread(function):
    """Return what `function` returns, or raises, in another thread."""
    found = []

    def run():
        try:
            found.append(function())
        except Exception as error:
            found.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return found[0]


def test_function_is_patched_in_this_thread_and_undone():
    with patched(Patch(Owner, "method", lambda self: "patched", "Try")):
        assert (Owner().method(), in_another_thread(Owner().method)) == ("patched", "original")
    assert Owner().method() == "original"


class Model(nn.Module):
    def __init__(self, during=lambda: None):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.during = during

    def forward(self, x):
        self.during()
        return self.linear(x).relu() * len(x)


def export(path, during=lambda: None, **options):
    model = Model(during)
    batch = {0: torch.export.Dim("batch", min=1)}
    aotexport.export(model, (torch.ones(2, 4),), output=path, dynamic_shapes=(batch,), verify=False, **options)


def originals():
    """Return what is there now of all that this process has patched in classes and modules, by target."""
    patched = [patch for patch in patches.seen.values() if patch.target.startswith(("torch", "math"))]
    return {
        patch.target: patch.owner.__code__ if patch.name == "__code__" else vars(patch.owner).get(patch.name)
        for patch in patched
        if hasattr(patch.owner, "__dict__")
    }


@pytest.fixture
def interrupts():
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def fail():
    raise ValueError("from the model")


@pytest.mark.parametrize(
    ("during", "error"),
    [
        (lambda: None, None),
        (fail, aotexport.AotExportError),
        (lambda: signal.raise_signal(signal.SIGINT), KeyboardInterrupt),
    ],
    ids=["success", "failure", "interrupt"],
)
def test_every_patch_of_an_export_is_undone(tmp_path, interrupts, during, error):
    export(tmp_path / "first")
    before = originals()
    assert len(before) > 80
    if error is None:
        export(tmp_path / "b", during)
    else:
        with pytest.raises(error):
            export(tmp_path / "b", during)
    after = originals()
    assert [target for target in before if before[target] is not after[target]] == []


_DEVICES = """
import gc, types
import torch
import aotexport
from aotexport.process import patches

class Model(torch.nn.Module):
    def forward(self, x):
        with torch.device("cpu"):
            return x + torch.ones(3), torch.linspace(0, 1, 3), torch.zeros(2, dtype=x.dtype)

aotexport.export(Model(), (torch.ones(2, 3),), output="bundle", verify=False)
with torch.device("meta"):
    made = [torch.empty(2), torch.ones(2), torch.tensor([1.0]), torch.linspace(0, 1, 3), torch.rand(2)]
assert {tensor.device.type for tensor in made} == {"meta"}

patches.seen.clear()
gc.collect()
(code,) = (each for each in patches.in_this_thread.__code__.co_consts if getattr(each, "co_name", "") == "dispatch")
functions = [each for each in gc.get_objects() if type(each) is types.FunctionType and each.__code__ is code]
assert functions == []

class Branches(torch.nn.Module):
    def forward(self, x):
        return torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,))

aotexport.export(Branches(), (torch.ones(2),), output="branches", verify=False)
assert torch.compile(lambda x: x + torch.is_grad_enabled(), backend="eager", fullgraph=True)(torch.ones(1)) == 2
"""


def test_torch_keeps_no_patched_function(tmp_path):
    assert run_script(None, cwd=tmp_path, text=_DEVICES).stderr == ""


def test_other_thread_trains_and_seeds_while_a_model_is_traced(tmp_path):
    def train():
        torch.manual_seed(0)
        weight = torch.ones(3, requires_grad=True)
        (weight * 2).sum().backward()
        assert weight.grad is not None
        return weight.grad.tolist()

    found = []
    export(tmp_path / "b", lambda: found.append(in_another_thread(train)))
    assert len(found) > 1
    assert all(gradient == [2.0, 2.0, 2.0] for gradient in found), found


def test_second_export_at_once_is_refused(tmp_path):
    found = []
    export(tmp_path / "b", lambda: found.append(in_another_thread(lambda: export(tmp_path / "other"))))
    assert {str(error) for error in found} == {
        "another thread of this process exports a model, and a process traces one at a time. Export one after the "
        "other, or in processes of their own"
    }
    assert not (tmp_path / "other").exists()
