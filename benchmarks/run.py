"""One run: what was asked for, and the ways in which suites turn it into figures."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from benchmarks.artefacts import Artefacts
from benchmarks.figures import Figure, Spread
from benchmarks.measure import Samples, alternate
from benchmarks.models import MODELS, Model
from benchmarks.processes import NotMeasured, Settings, Source
from benchmarks.systems import SYSTEMS, System
from benchmarks.systems.interface import Mode

MAIN_MODELS = ("mlp", "gpt2", "bert", "resnet", "lstm", "vit", "minilm")
"""What suites measure where no models are chosen and the suite names no others."""

BASELINE = "eager"
"""The system that others are compared with, where a suite names no other."""


@dataclass(frozen=True)
class Run:
    """What was asked for.

    Attributes:
        model_names: chosen models; None: the suite's own choice.
        system_names: chosen systems.
        rounds: samples per figure; suites whose samples take seconds take fewer.
        round_s: seconds of a round of executions that take less.
        settings: of every process.
        artefacts: what was prepared.
        progress: told what begins.
        scale_steps: how many sizes of growing graphs are measured, from the smallest on; of weights, one less.
    """

    model_names: tuple[str, ...] | None
    system_names: tuple[str, ...]
    rounds: int
    round_s: float
    settings: Settings
    artefacts: Artefacts
    progress: Callable[[str], None]
    scale_steps: int = 3

    def models(self, suite: str, default: tuple[str, ...] = MAIN_MODELS) -> list[Model]:
        """Return the chosen models that `suite` can measure.

        Args:
            suite: by name.
            default: what the suite measures, beside models made for it, where none were chosen.
        """
        made = [model.name for model in MODELS.values() if suite in model.only_in]
        names = (*default, *made) if self.model_names is None else self.model_names
        return [MODELS[name] for name in names if suite in (MODELS[name].only_in or (suite,))]

    def systems(self, *modes: Mode) -> list[System]:
        """Return the chosen systems that can do all of `modes`."""
        chosen = [system for system in SYSTEMS.values() if system.name in self.system_names]
        return [system for system in chosen if system.modes.issuperset(modes) and system.load is not None]

    def spec(self, system: System, model: Model, **more: Any) -> dict[str, Any]:
        """Return the task of a process.

        Raises:
            NotMeasured: the system's artefact could not be prepared.
        """
        default = next(iter(system.load_variants))
        directory = str(self.artefacts.of(system, model))
        names = {"system": system.name, "model": model.name, "directory": directory, "variant": default}
        return {**names, "round_s": self.round_s, **more}

    def compare(
        self,
        title: Figure,
        sources: Mapping[str, Callable[[], Source]],
        *,
        rounds: int | None = None,
        baseline: str = BASELINE,
    ) -> list[Figure]:
        """Return one figure per source of times, each with its ratio to the baseline's.

        Args:
            title: suite, model and measure of the figures.
            sources: makers of sources, by system.
            rounds: how many; None: as asked for.
            baseline: which of the systems; without it there are no ratios.
        """
        self.progress(f"{title.suite}: {title.model}, {title.measure}")
        results = alternate(sources, rounds or self.rounds)
        base = results.get(baseline)
        return [times(title, system, samples, base, Spread.over) for system, samples in results.items()]


def times(
    title: Figure,
    system: str,
    samples: Samples | NotMeasured,
    base: Samples | NotMeasured | None,
    compare: Callable[[Spread, Spread], Spread],
) -> Figure:
    """Return the figure of samples of times.

    Args:
        title: suite, model and measure.
        system: whose samples.
        samples: its samples, or why there are none.
        base: the baseline's.
        compare: gives the relative value from the value and the baseline's.
    """
    figure = partial(Figure, suite=title.suite, model=title.model, measure=title.measure, system=system)
    if isinstance(samples, NotMeasured):
        return figure(reason=str(samples))
    value, cpu = _spread(samples, "wall_s"), _spread(samples, "cpu_s")
    figure = partial(figure, **{key: _parts(samples, key) for key in ("stages", "stages_cpu", "stages_peak")})
    if base is None or isinstance(base, NotMeasured):
        return figure(value=value, cpu=cpu)
    base_value, base_cpu = _spread(base, "wall_s"), _spread(base, "cpu_s")
    return figure(
        value=value,
        cpu=cpu,
        relative=compare(value, base_value),
        relative_cpu=compare(cpu, base_cpu),
        relative_best=compare(_best(samples), _best(base)).median,
    )


def _parts(samples: Samples, key: str) -> dict[str, Spread]:
    """Return what samples tell by stage; a sample without a stage has none of it."""
    names = dict.fromkeys(name for sample in samples for name in sample.get(key, {}))
    return {name: Spread.of([sample[key].get(name, 0.0) for sample in samples]) for name in names}


def _spread(samples: Samples, key: str) -> Spread:
    return Spread.of([sample[key] for sample in samples])


def _best(samples: Samples) -> Spread:
    """Return the least time as a spread of one: sources that time no shorter stretches give that of a sample."""
    return Spread.of([min(sample.get("best_s", sample["wall_s"]) for sample in samples)])
