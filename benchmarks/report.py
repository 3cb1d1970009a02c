"""Figures as aligned text, as Markdown and as JSON."""

from __future__ import annotations

import dataclasses
import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from benchmarks.figures import Figure, Spread
from benchmarks.suites import SUITES, Suite

_SMALL_STAGE = 0.01
"""Stages below this fraction of the whole are left out of tables."""


def text(suite: Suite, figures: Sequence[Figure]) -> str:
    """Return a table with aligned columns, below its title."""
    rows = _rows(suite, figures)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([f"{suite.name}: {suite.summary}", lines[0], "-" * len(lines[0]), *lines[1:]])


def markdown(
    machine: Mapping[str, str], notes: Sequence[str], figures: Sequence[Figure], missing: Sequence[str]
) -> str:
    """Return a document with a summary per suite, that says which suites are not finished."""
    parts = ["# Figures", "", *(f"- {name}: {value}" for name, value in machine.items())]
    if missing:
        parts += ["", f"This run was stopped; not finished, or not begun: {', '.join(missing)}."]
    if notes:
        parts += ["", "Notes:", "", *(f"- {note}" for note in notes)]
    for suite in SUITES.values():
        own = [figure for figure in figures if figure.suite == suite.name]
        if own:
            head, *rows = _summary(suite, own)
            parts += ["", f"## {suite.name}", "", f"{suite.summary[0].upper()}{suite.summary[1:]}.", ""]
            parts += [f"Medians, {suite.relative_to}; of the baseline itself, its time or memory.", ""]
            parts += [_line(head), _line(["---"] * len(head)), *map(_line, rows)]
    return "\n".join(parts) + "\n"


def _summary(suite: Suite, figures: Sequence[Figure]) -> list[list[str]]:
    """Return head and rows: of one measure a column per model, of several one per system, with medians over models."""
    by_row: dict[tuple[str, str], list[Figure]] = {}
    for figure in figures:
        by_row.setdefault((figure.measure, figure.system), []).append(figure)
    measures, systems, models = (
        list(dict.fromkeys(names))
        for names in zip(*((figure.measure, figure.system, figure.model) for figure in figures), strict=True)
    )
    if len(measures) > 1:
        rows = [["measure", *systems]]
        return rows + [
            [measure, *(_middle(suite, by_row.get((measure, system), [])) for system in systems)]
            for measure in measures
        ]
    rows = [["system", *models, *["mean"] * suite.averaged]]
    for (_, system), own in by_row.items():
        by_model = {figure.model: figure for figure in own}
        cells = [_cell(suite, by_model[model]) if model in by_model else "" for model in models]
        if suite.averaged:
            ratios = [figure.relative.median for figure in own if figure.relative]
            cells.append(f"{statistics.geometric_mean(ratios):.2f}" if len(ratios) > 1 else "")
        rows.append([system, *cells])
    return rows


def _middle(suite: Suite, figures: Sequence[Figure]) -> str:
    """Return the median over models of a measure and system."""
    found = [
        (figure.relative.median if figure.relative else 1.0, figure.value.median, figure)
        for figure in figures
        if figure.value
    ]
    if not found:
        return "-" if figures else ""
    return _cell(suite, sorted(found, key=lambda each: each[:2])[(len(found) - 1) // 2][2])


def _cell(suite: Suite, figure: Figure) -> str:
    if figure.value is None:
        return "-"
    if figure.relative is not None and not _is_baseline(suite, figure.relative):
        return _RELATIVE[suite.relative_as](figure.relative.median)
    return (_seconds if figure.unit == "s" else _bytes)(figure.value.median)


def _is_baseline(suite: Suite, relative: Spread) -> bool:
    return suite.relative_as == "ratio" and relative.lower == relative.median == relative.upper == 1


def as_json(
    machine: Mapping[str, str],
    settings: Mapping[str, Any],
    notes: Sequence[str],
    figures: Sequence[Figure],
    missing: Sequence[str],
) -> str:
    """Return everything, with the samples of every round; seconds and bytes."""
    rows = [{name: value for name, value in dataclasses.asdict(figure).items() if value} for figure in figures]
    document = {"machine": machine, "settings": settings, "notes": notes, "missing": missing, "figures": rows}
    return json.dumps(document, indent=1) + "\n"


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _rows(suite: Suite, figures: Sequence[Figure]) -> list[list[str]]:
    """Return head and rows of a table; columns that no row fills are left out."""
    relative = suite.relative_to
    head = [
        "model",
        "measure",
        "system",
        "wall",
        "cpu time",
        f"{relative}, wall",
        "(quartiles)",
        "best",
        "cpu",
        "remark",
    ]
    if all(figure.unit == "B" for figure in figures if figure.value is not None):
        head[3], head[5] = "memory", relative
    rows = [head]
    for figure in figures:
        rows.append(_row(suite, figure))
        rows += [_stage_row(figure, stage, part) for stage, part in _stages(figure)]
    if suite.averaged:
        rows += _means(figures)
    filled = [index for index in range(len(head)) if any(row[index] for row in rows[1:])]
    return [[row[index] for index in filled] for row in rows]


def _row(suite: Suite, figure: Figure) -> list[str]:
    names = [figure.model, figure.measure, figure.system]
    if figure.value is None:
        return [*names, "-", *[""] * 5, f"not measured: {figure.reason}"]
    show = _seconds if figure.unit == "s" else _bytes
    compare = _RELATIVE[suite.relative_as]
    return [
        *names,
        show(figure.value.median),
        _median(figure.cpu, _seconds),
        _median(figure.relative, compare),
        f"({compare(figure.relative.lower)} - {compare(figure.relative.upper)})" if figure.relative else "",
        "" if figure.relative_best is None else compare(figure.relative_best),
        _median(figure.relative_cpu, compare),
        "",
    ]


def _means(figures: Sequence[Figure]) -> list[list[str]]:
    """Return a row of geometric means per measure and system, of ratios, over the models that have one."""
    rows: list[list[str]] = []
    for measure, system in dict.fromkeys((figure.measure, figure.system) for figure in figures):
        own = [figure for figure in figures if (figure.measure, figure.system) == (measure, system)]
        walls = [figure.relative.median for figure in own if figure.relative]
        if len(walls) > 1:
            best = [figure.relative_best for figure in own if figure.relative_best]
            cpu = [figure.relative_cpu.median for figure in own if figure.relative_cpu]
            means = [f"{statistics.geometric_mean(ratios):.2f}" if ratios else "" for ratios in (walls, best, cpu)]
            rows.append([f"mean of {len(walls)}", measure, system, "", "", means[0], "", means[1], means[2], ""])
    return rows


def _stages(figure: Figure) -> list[tuple[str, Spread]]:
    if figure.value is None:
        return []
    least = _SMALL_STAGE * figure.value.median
    return [(stage, part) for stage, part in figure.stages.items() if part.median >= least]


def _stage_row(figure: Figure, stage: str, part: Spread) -> list[str]:
    cpu, peak = figure.stages_cpu.get(stage), figure.stages_peak.get(stage)
    remark = "" if peak is None else f"peak memory {_bytes(peak.median)}"
    return ["", f"  {stage}", "", _seconds(part.median), _median(cpu, _seconds), *[""] * 4, remark]


def _median(spread: Spread | None, show: Callable[[float], str]) -> str:
    return "" if spread is None else show(spread.median)


def _seconds(value: float) -> str:
    """Return three digits with the unit that fits."""
    for factor, unit in ((1e6, "us"), (1e3, "ms")):
        if abs(value) * factor < 999.5:
            return f"{value * factor:.3g} {unit}"
    return f"{value:.2f} s"


def _bytes(value: float) -> str:
    return f"{value / 2**20:.1f} MiB"


_RELATIVE: dict[str, Callable[[float], str]] = {
    "ratio": lambda value: f"{value:.2f}",
    "seconds": lambda value: f"{value:+.2f} s",
    "percent": lambda value: f"{value:.1%}",
}
