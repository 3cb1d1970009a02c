"""Figures as pictures: bars per model, and curves of growth. Needs matplotlib."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.figures import Figure
from benchmarks.suites import SUITES, Suite

_GROWTH = "scale"


def write(figures: Sequence[Figure], directory: Path) -> list[Path]:
    """Write a PNG per suite and measure to `directory`; return them.

    Raises:
        ImportError: matplotlib is not installed.
    """
    import matplotlib

    matplotlib.use("Agg")
    directory.mkdir(parents=True, exist_ok=True)
    paths: list[Path] = []
    for suite in SUITES.values():
        own = [figure for figure in figures if figure.suite == suite.name and figure.value is not None]
        if suite.name == _GROWTH:
            paths += [_curves(own, unit, directory / f"scale-{unit.lower()}.png") for unit in ("nodes", "MiB")]
            continue
        for measure in dict.fromkeys(figure.measure for figure in own):
            of_measure = [figure for figure in own if figure.measure == measure]
            paths.append(_bars(suite, measure, of_measure, directory / f"{suite.name}-{_slug(measure)}.png"))
    return paths


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


def _bars(suite: Suite, measure: str, figures: Sequence[Figure], path: Path) -> Path:
    """Draw a group of bars per model, a bar per system: relative values where there are any."""
    import matplotlib.pyplot as plt

    models = list(dict.fromkeys(figure.model for figure in figures))
    systems = list(dict.fromkeys(figure.system for figure in figures))
    relative = all(figure.relative is not None for figure in figures) and suite.relative_as == "ratio"
    plot, axes = plt.subplots(figsize=(2 + 1.4 * len(models), 4), layout="constrained")
    width = 0.8 / max(len(systems), 1)
    for position, system in enumerate(systems):
        found: dict[str, Any] = {f.model: (f.relative if relative else f.value) for f in figures if f.system == system}
        places = [index + (position + 0.5) * width - 0.4 for index, model in enumerate(models) if model in found]
        spreads = [found[model] for model in models if model in found]
        heights = [spread.median for spread in spreads]
        errors = [[s.median - s.lower for s in spreads], [s.upper - s.median for s in spreads]]
        axes.bar(places, heights, width, yerr=errors, label=system, error_kw={"linewidth": 0.8})
    axes.set_xticks(range(len(models)), models)
    unit = {"s": "seconds", "B": "bytes"}[figures[0].unit]
    axes.set_ylabel(f"{suite.relative_to}; lower is better" if relative else unit)
    if relative:
        axes.axhline(1, color="black", linewidth=0.8)
    axes.set_title(f"{suite.name}: {measure}")
    axes.legend(fontsize="small", ncols=2)
    plot.savefig(path, dpi=120)
    plt.close(plot)
    return path


def _curves(figures: Sequence[Figure], unit: str, path: Path) -> Path:
    """Draw seconds by size, a curve per measure and system."""
    import matplotlib.pyplot as plt

    plot, axes = plt.subplots(figsize=(7, 5), layout="constrained")
    own = [figure for figure in figures if figure.model.endswith(unit)]
    for key in dict.fromkeys((figure.measure, figure.system) for figure in own):
        points = [
            (int(figure.model.split()[0]), figure.value.median)
            for figure in own
            if (figure.measure, figure.system) == key and figure.value is not None
        ]
        axes.plot(*zip(*points, strict=True), marker="o", label=f"{key[0]}, {key[1]}")
    axes.set(xscale="log", yscale="log", xlabel=unit, ylabel="seconds", title=f"growth with {unit}")
    if own:
        axes.legend(fontsize="small")
    plot.savefig(path, dpi=120)
    plt.close(plot)
    return path
