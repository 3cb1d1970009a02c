"""Candidates timed at the first launch, on copies, and what is remembered; launchers and the clock are stand-ins."""

import pytest
import torch

from aotexport_runtime import NotSupported
from aotexport_runtime.engines.cuda import tuning
from aotexport_runtime.engines.cuda.tuning import TunedKernel
from aotexport_runtime.execution.user_cache import Measurements
from aotexport_runtime.schema.targets import Kernel, KernelBinary, KernelCandidate, PointerParameter

KERNEL = Kernel(
    name="k",
    parameters=(PointerParameter(name="x", dtype="float32"), PointerParameter(name="y", dtype="float32")),
    candidates=(KernelCandidate(num_warps=1, num_stages=1, grid=(1, 1, 1)),),
)


class Adding:
    """A launcher of a kernel that adds a number to `x`, in place, and takes some time."""

    kernel = KERNEL

    def __init__(self, number, milliseconds, fails=False):
        self.number, self.milliseconds, self.fails = number, milliseconds, fails
        self.binary = KernelBinary(architecture="sm_80", offset=0, nbytes=1, sha256=f"{number:064}")
        self.launches = []

    def grid(self, arguments):
        return (arguments["x"].numel(), 1, 1)

    def __call__(self, **arguments):
        if self.fails:
            raise NotSupported("too many blocks")
        self.launches.append(arguments)
        arguments["x"].add_(self.number)
        Clock.now += self.milliseconds


class Clock:
    now = 0.0

    @classmethod
    def measure(cls, prepare, launch):
        launch()
        prepare()
        start = cls.now
        launch()
        return cls.now - start


@pytest.fixture(autouse=True)
def _clock(monkeypatch):
    monkeypatch.setattr(tuning, "device_time", Clock.measure)
    monkeypatch.setattr(tuning, "may_measure", lambda: True)


def kept(directory=None):
    return lambda launchers: Measurements(directory, [each.binary.sha256 for each in launchers])


def test_fastest_candidate_runs_and_the_arguments_are_changed_once():
    slow, fast, x = Adding(1, 5.0), Adding(2, 3.0), torch.zeros(4)
    launch = TunedKernel([slow, fast], kept())
    launch(x=x, y=x)
    assert x.tolist() == [2.0] * 4
    launch(x=x, y=x)
    assert x.tolist() == [4.0] * 4
    assert all(arguments["x"] is not x for arguments in slow.launches)


def test_copies_have_values_strides_and_sharing_of_the_originals():
    memory = torch.arange(12.0)
    x, y = memory.view(3, 4).t(), memory[5:]
    before = memory.clone()
    timed = Adding(1, 1.0)
    TunedKernel([timed, Adding(1, 0.5)], kept())(x=x, y=y)
    first = timed.launches[0]
    assert first["x"].stride() == x.stride()
    assert first["y"].storage_offset() == 5
    assert first["x"].untyped_storage().data_ptr() == first["y"].untyped_storage().data_ptr() != memory.data_ptr()
    assert torch.equal(memory, before + 1)


def test_next_process_runs_the_winner_without_timing(tmp_path):
    TunedKernel([Adding(1, 5.0), Adding(2, 3.0)], kept(tmp_path))(x=torch.zeros(1), y=torch.zeros(1))
    slow, fast = Adding(1, 5.0), Adding(2, 3.0)
    TunedKernel([slow, fast], kept(tmp_path))(x=torch.zeros(1), y=torch.zeros(1))
    assert (len(slow.launches), len(fast.launches)) == (0, 1)
