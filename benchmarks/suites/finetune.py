"""Fine-tuning: time and memory of a step with its optimizer; all weights, a half of them, LoRA."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

from benchmarks.figures import Figure, Spread
from benchmarks.models import Model
from benchmarks.processes import Worker
from benchmarks.run import BASELINE, Run
from benchmarks.suites.interface import Suite
from benchmarks.suites.steps import TRAIN_TOLERANCE, Checked
from benchmarks.systems import System
from benchmarks.tuning import TUNINGS

_MODELS = ("gpt2", "bert", "vit", "minilm")
_SYSTEMS = ("eager", "auto", "autograd", "torch.compile")


def _figures(run: Run) -> Iterator[Figure]:
    systems = [system for system in run.systems("train") if system.name in _SYSTEMS]
    for model in run.models("finetune", _MODELS):
        run.artefacts.prepare(systems, model)
        for tuning in TUNINGS:
            yield from _compare(run, systems, model, tuning)


def _compare(run: Run, systems: list[System], model: Model, tuning: str) -> Iterator[Figure]:
    losses: dict[str, float] = {}
    workers: dict[str, Worker] = {}

    def start(system: System) -> Worker:
        spec = run.spec(system, model, action=f"tune {tuning}", allocations=True)
        workers[system.name] = Checked(spec, run.settings, losses, TRAIN_TOLERANCE)
        return workers[system.name]

    sources: dict[str, Callable[[], Worker]] = {system.name: partial(start, system) for system in systems}
    title = Figure(suite="finetune", model=model.name, measure=f"step, {tuning}", system="")
    figures = run.compare(title, sources)
    yield from figures
    measured = [figure.system for figure in figures if figure.value is not None]
    yield from _memory(model, tuning, {name: workers[name].first()["allocated_nbytes"] for name in measured})


def _memory(model: Model, tuning: str, nbytes: dict[str, int]) -> Iterator[Figure]:
    base = nbytes.get(BASELINE)
    for name, value in nbytes.items():
        yield Figure(
            suite="finetune",
            model=model.name,
            measure=f"memory, {tuning}",
            system=name,
            unit="B",
            value=Spread.of([value]),
            relative=None if base is None else Spread.of([value / base]),
        )


FINETUNE = Suite(
    "finetune",
    "forward, loss, backward, AdamW; memory: the most that a step allocates at a time; LoRA by peft but in bundles",
    _figures,
    averaged=True,
)
