"""Training steps, inference, and the fixed cost of a call: every system in a process that stays."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from benchmarks.figures import Figure
from benchmarks.models import MODELS, Model
from benchmarks.processes import NotMeasured, Settings, Worker
from benchmarks.run import BASELINE, Run
from benchmarks.suites.interface import Suite
from benchmarks.systems import System
from benchmarks.systems.interface import Mode

TRAIN_TOLERANCE = 0.1
_TOLERANCE: dict[Mode, float] = {"infer": 1e-3, "train": TRAIN_TOLERANCE}
"""How far the loss of the first execution may be from eager's; random draws may differ in training."""


def _train(run: Run) -> Iterator[Figure]:
    for model in run.models("train"):
        yield from _compare(run, "train", model, "train step", "train")


def _infer(run: Run) -> Iterator[Figure]:
    for model in run.models("infer"):
        yield from _compare(run, "infer", model, "inference", "infer")


def _overhead(run: Run) -> Iterator[Figure]:
    for measure in ("forward", "forward + backward"):
        yield from _compare(run, "overhead", MODELS["mlp"], measure, "train")
    yield from _compare(run, "overhead", MODELS["mlp"], "inference", "infer")


def _compare(run: Run, suite: str, model: Model, action: str, mode: Mode) -> list[Figure]:
    losses: dict[str, float] = {}

    def start(system: System) -> Checked:
        return Checked(run.spec(system, model, action=action), run.settings, losses, _TOLERANCE[mode])

    systems = run.systems(mode)
    run.artefacts.prepare(systems, model)
    sources: dict[str, Callable[[], Worker]] = {system.name: partial(start, system) for system in systems}
    return run.compare(Figure(suite=suite, model=model.name, measure=action, system=""), sources)


class Checked(Worker):
    """A process that is ready only if its loss is the baseline's."""

    def __init__(
        self,
        spec: dict[str, Any],
        settings: Settings,
        losses: dict[str, float],
        tolerance: float,
        baseline: str = BASELINE,
    ) -> None:
        super().__init__(spec, settings)
        self._baseline = baseline
        self._system = spec["system"]
        self._losses = losses
        self._tolerance = tolerance

    def ready(self) -> None:
        """Wait for the first execution, and refuse to time a system that computes something else."""
        self._losses[self._system] = self.first()["loss"]
        _check_same(self._losses, self._system, self._baseline, self._tolerance)


def _check_same(losses: dict[str, float], system: str, baseline: str, tolerance: float) -> None:
    """Refuse to time a system that computes something else.

    Raises:
        NotMeasured: its loss is not the baseline's.
    """
    ours, theirs = losses[system], losses.get(baseline)
    if theirs is not None and not abs(ours - theirs) <= tolerance * abs(theirs):
        raise NotMeasured(f"it computes something else: its loss is {ours:.6g}, that of {baseline} {theirs:.6g}")


TRAIN = Suite("train", "gradients reset, forward, loss, backward; no optimizer", _train, averaged=True)
INFER = Suite("infer", "a call in eval mode under no_grad", _infer, averaged=True)
OVERHEAD = Suite("overhead", "fixed cost of a call: the smallest model", _overhead)
