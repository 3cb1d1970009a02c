"""Fine-tuning: time and memory of a step with its optimizer; all weights, a half of them, LoRA; on several ranks."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import partial

from benchmarks.figures import Figure, Spread
from benchmarks.models import Model
from benchmarks.processes import Group, Worker
from benchmarks.run import BASELINE, Run
from benchmarks.sharing import WAYS
from benchmarks.suites.interface import Suite
from benchmarks.suites.steps import TRAIN_TOLERANCE, Checked
from benchmarks.systems import System
from benchmarks.tuning import TUNINGS

_MODELS = ("gpt2", "bert", "vit", "minilm")
_SYSTEMS = ("eager", "auto", "autograd", "torch.compile")
_STEP_MODELS, _STEP_PEERS = ("mlp", "gpt2", "bert", "resnet", "vit"), ("eager", "torch.compile")
_SHARED_MODELS, _SHARED_SYSTEMS, _RANKS = ("gpt2",), ("eager", "auto"), (2, 4)


def _figures(run: Run) -> Iterator[Figure]:
    systems = [system for system in run.systems("train") if system.name in _SYSTEMS]
    for model in run.models("finetune", _MODELS):
        run.artefacts.prepare(systems, model)
        for tuning in TUNINGS:
            yield from _compare(run, systems, model, tuning, f"tune {tuning}")
    shared = [system for system in systems if system.name in _SHARED_SYSTEMS]
    for model in run.models("finetune", _SHARED_MODELS):
        run.artefacts.prepare(shared, model)
        for ranks, way in itertools.product(_RANKS, WAYS):
            yield from _on_ranks(run, shared, model, way, ranks)


def _whole(run: Run) -> Iterator[Figure]:
    systems = [system for system in run.systems("train") if system.name in _STEP_PEERS] + run.systems("step")
    for model in run.models("step", _STEP_MODELS):
        run.artefacts.prepare(systems, model)
        yield from _compare(run, systems, model, "AdamW", "whole step", suite="step")


def _compare(
    run: Run, systems: list[System], model: Model, tuning: str, action: str, suite: str = "finetune"
) -> Iterator[Figure]:
    losses: dict[str, float] = {}
    workers: dict[str, Worker] = {}

    def start(system: System) -> Worker:
        spec = run.spec(system, model, action=action, allocations=True)
        workers[system.name] = Checked(spec, run.settings, losses, TRAIN_TOLERANCE)
        return workers[system.name]

    sources: dict[str, Callable[[], Worker]] = {system.name: partial(start, system) for system in systems}
    title = Figure(suite=suite, model=model.name, measure=f"step, {tuning}", system="")
    figures = run.compare(title, sources)
    yield from figures
    measured = [figure.system for figure in figures if figure.value is not None]
    yield from _memory(
        model,
        f"memory, {tuning}",
        {name: nbytes for name in measured if (nbytes := workers[name].first()["allocated_nbytes"])},
        suite,
    )


def _on_ranks(run: Run, systems: list[System], model: Model, way: str, ranks: int) -> Iterator[Figure]:
    groups: dict[str, Group] = {}

    def start(system: System) -> Group:
        groups[system.name] = Group(
            run.spec(system, model, action=f"share {way}", allocations=True), ranks, run.settings
        )
        return groups[system.name]

    sources: dict[str, Callable[[], Group]] = {system.name: partial(start, system) for system in systems}
    what = f"{way} on {ranks} ranks"
    figures = run.compare(Figure(suite="finetune", model=model.name, measure=f"step, {what}", system=""), sources)
    yield from figures
    firsts = {figure.system: groups[figure.system].first() for figure in figures if figure.value is not None}
    for name, key in (("memory", "allocated_nbytes"), ("held", "held_nbytes")):
        most = {system: max(answer[key] for answer in answers) for system, answers in firsts.items()}
        yield from _memory(model, f"{name}, {what}", most)


def _memory(model: Model, measure: str, nbytes: dict[str, int], suite: str = "finetune") -> Iterator[Figure]:
    base = nbytes.get(BASELINE)
    for name, value in nbytes.items():
        yield Figure(
            suite=suite,
            model=model.name,
            measure=measure,
            system=name,
            unit="B",
            value=Spread.of([value]),
            relative=None if base is None else Spread.of([value / base]),
        )


FINETUNE = Suite(
    "finetune",
    "forward, loss, backward, AdamW; memory: the most that a step allocates at a time; LoRA by peft but in bundles; "
    "held: weights, gradients and state of a rank after a step",
    _figures,
    averaged=True,
)

STEP = Suite(
    "step",
    "forward, loss, backward, AdamW over all weights: eager's loops, and the step as one program",
    _whole,
    averaged=True,
)
