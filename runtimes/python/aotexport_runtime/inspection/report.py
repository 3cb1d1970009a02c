"""A bundle as one page of HTML: its calling convention, memory and time of its programs, modules, weights."""

from __future__ import annotations

import io
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from aotexport_runtime.bundle.notes import notes_of
from aotexport_runtime.bundle.read import Bundle
from aotexport_runtime.bundle.signature import SIGNATURE_NAME
from aotexport_runtime.commands.results import describe_graphs
from aotexport_runtime.commands.self_test import run_vectors
from aotexport_runtime.errors import ArgumentInvalid, NotSupported, first_line
from aotexport_runtime.execution.source import line_of
from aotexport_runtime.inspection.diff import diff_bundles, operator_counts
from aotexport_runtime.inspection.memory import CATEGORIES, Timeline, timeline
from aotexport_runtime.inspection.recorded import recorded_call, recorded_sizes
from aotexport_runtime.inspection.timing import NodeTimes, measure
from aotexport_runtime.module.bundle_module import BundleModule
from aotexport_runtime.module.describe import (
    describe_overview,
    describe_program,
    describe_refusals,
    graph_files,
    sections,
)
from aotexport_runtime.module.loading import LoadOptions, load_module

try:
    import jinja2
    import matplotlib
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure
except ImportError as error:
    raise NotSupported(f"reports need matplotlib ({error}): pip install 'aotexport-runtime[report]'") from None

_COLORS = ("#7b8794", "#9b8bd1", "#4f9dde", "#e2a03f", "#c8d0da", "#d1605e")
_POINTS = 400
_TEXT = "#123456"
"""The color of texts in a chart, which becomes the page's."""


@dataclass(frozen=True)
class ModuleRow:
    """A module with all that is below it: elements and bytes of its parameters, bytes kept for backward, seconds."""

    path: str
    depth: int
    elements: int
    nbytes: int
    saved: int
    seconds: float


def report(
    bundle: Bundle,
    options: LoadOptions,
    *,
    sizes: Mapping[str, int],
    against: Bundle | None = None,
    timed: bool = True,
    progress: Callable[[str], None] = lambda stage: None,
) -> str:
    """Return the page of `bundle`.

    Args:
        bundle: an open bundle.
        options: how to load it, by its graphs.
        sizes: value of dimensions by name, for the memory of a call; others are as in the recorded calls.
        against: a bundle to compare with.
        timed: whether the recorded calls are run, for their time and what differs from eager.
        progress: is told the name of each stage as it begins.

    Raises:
        ArgumentInvalid: no program has a dimension of `sizes`, or it is outside of its range.
    """
    records = [bundle.program(name) for name in bundle.program_names]
    known = sorted({dimension.name for record in records for dimension in record.dimensions})
    if missing := sizes.keys() - known:
        raise ArgumentInvalid(f"no dimension `{min(missing)}`; the bundle has {', '.join(known) or 'none'}")
    module, why_not = _loaded(bundle, options)
    environment = jinja2.Environment(
        autoescape=True, loader=jinja2.FileSystemLoader(Path(__file__).parent), undefined=jinja2.StrictUndefined
    )
    environment.filters |= {"bytes": shown_bytes, "seconds": shown_seconds, "count": "{:,}".format}
    return environment.get_template("report.html").render(
        name=bundle.manifest.name,
        overview=describe_overview(bundle),
        notes=[note.shown() for note in notes_of(bundle)],
        programs=[_program(bundle, name, sizes, module if timed else None, progress) for name in bundle.program_names],
        why_not_loaded=why_not,
        why_not_timed=why_not or ("" if timed else "it was not asked for (--no-measure)"),
        weights=[] if module is None else list(_weights(bundle, module)),
        verification=_verification(bundle, options if module is not None and timed else None, progress),
        targets=list(_targets(bundle)),
        against="" if against is None else against.manifest.name,
        differences=[] if against is None else diff_bundles(against, bundle),
        categories=list(zip(CATEGORIES, _COLORS, strict=True)),
    )


def _loaded(bundle: Bundle, options: LoadOptions) -> tuple[BundleModule | None, str]:
    try:
        return load_module(bundle, options), ""
    except NotSupported as error:
        return None, first_line(error)


def _verification(bundle: Bundle, options: LoadOptions | None, progress: Callable[[str], None]) -> list[str]:
    """Return lines on how the writer compared the bundle, whether it is signed, and what its calls give here."""
    levels = {None: "its writer does not say", "none": "not at all"}
    level = bundle.manifest.verification
    lines = [f"compared with eager at export: {levels.get(level, level)}"]
    if (bundle.directory.files / SIGNATURE_NAME).is_file():
        lines.append("signed; `aotexport verify-signature` says whether by a signer whom you know")
    if options is not None:
        progress("compare the recorded calls")
        allowed = {"operator_namespaces": options.operator_namespaces, "tensor_types": options.tensor_types}
        lines += describe_graphs(run_vectors(bundle, **allowed))
    return lines


def _program(
    bundle: Bundle, name: str, sizes: Mapping[str, int], module: BundleModule | None, progress: Callable[[str], None]
) -> dict[str, Any]:
    progress(f"{name}: memory and time")
    program = bundle.program(name)
    symbols = recorded_sizes(bundle, program, sizes)
    memory, times, why_not = timeline(bundle, program, symbols), None, ""
    run = None if module is None else recorded_call(module, program)
    if run is not None:
        try:
            times = measure(run)
        except (RuntimeError, NotSupported) as error:
            why_not = f"{type(error).__name__}: {first_line(error)}"
    graphs = {file: bundle.graph(name, file) for file in graph_files(program)}
    counts = operator_counts(graphs[program.functional.file if program.functional else program.forward.file])
    return {
        "name": name,
        "title": describe_program(bundle, program),
        "sections": sections(bundle, program),
        "refusals": describe_refusals(bundle, program),
        "graphs": {file: len(graph.nodes) for file, graph in graphs.items()},
        "guards": [each.name for each in program.dimensions],
        "memory": memory,
        "chart": "" if memory is None else _chart(memory),
        "times": times,
        "why_not_timed": why_not,
        "operators": _operators(counts, times),
        "lines": [] if times is None else list(times.by(line_of).items())[:10],
        "modules": list(_modules(bundle, memory, times)),
    }


def _operators(counts: Counter[str], times: NodeTimes | None) -> list[tuple[str, int, float]]:
    """Return per operator its calls in the graph and its seconds, the dearest first."""
    seconds = {} if times is None else times.by(lambda node: node.op)
    names = dict.fromkeys([*seconds, *(name for name, _ in counts.most_common())])
    return [(name, counts[name], seconds.get(name, 0.0)) for name in names]


def _modules(bundle: Bundle, memory: Timeline | None, times: NodeTimes | None) -> Iterator[ModuleRow]:
    """Yield a row per module, each before those below it."""
    elements, nbytes, saved, seconds = Counter[str](), Counter[str](), Counter[str](), Counter[str]()
    for entry in bundle.manifest.state:
        owner = entry.name.rpartition(".")[0]
        if entry.role == "parameter":
            elements[owner] += math.prod(entry.shape)
        nbytes[owner] += math.prod(entry.shape) * getattr(torch, entry.dtype).itemsize
    for row in memory.saved if memory else ():
        saved[row.module] += row.nbytes
    for path, spent in (times.by(lambda node: node.module) if times else {}).items():
        seconds[path] += spent  # pyrefly: ignore[unsupported-operation] (a counter of seconds)
    paths = {""}
    for path in {*elements, *nbytes, *saved, *seconds}:
        parts = path.split(".")
        paths.update(".".join(parts[:count]) for count in range(1, len(parts) + 1))
    for path in sorted(paths, key=_natural):

        def below(counter: Mapping[str, Any], path: str = path) -> Any:
            return sum(value for name, value in counter.items() if not path or f"{name}.".startswith(f"{path}."))

        depth = path.count(".") + 1 if path else 0
        yield ModuleRow(path, depth, *map(below, (elements, nbytes, saved, seconds)))


def _natural(path: str) -> list[tuple[int, str]]:
    """Return a key that orders `layers.2` before `layers.10`."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in path.split(".")] if path else []


def _weights(bundle: Bundle, module: BundleModule) -> Iterator[dict[str, Any]]:
    """Yield what the values of a tensor of the state are like."""
    tensors = module.state_tensors()
    for entry in bundle.manifest.state:
        tensor = tensors[entry.name].detach()
        row = {"name": entry.name, "role": entry.role, "tied": entry.tied, "dtype": entry.dtype}
        row |= {"shape": list(entry.shape), "histogram": "", "norm": "", "range": "", "wrong": 0}
        if tensor.numel() and tensor.is_floating_point() and type(tensor) in (torch.Tensor, torch.nn.Parameter):
            values = tensor.float().flatten()
            finite = values[values.isfinite()]
            row["wrong"] = values.numel() - finite.numel()
            if finite.numel():
                row["norm"] = f"{finite.norm():.4g}"
                row["range"] = f"{finite.min():.3g} to {finite.max():.3g}"
                row["histogram"] = _bars(torch.histc(finite, 24).tolist())
        yield row


def _bars(counts: Sequence[float]) -> str:
    """Return the path of a histogram in a box of 72 by 16."""
    top = max(counts)
    return "".join(f"M{3 * i} 16v-{16 * count / top:.1f}h2V16z" for i, count in enumerate(counts) if count)


def _targets(bundle: Bundle) -> Iterator[tuple[str, str, list[str]]]:
    for name in bundle.target_names:
        target = bundle.target(name)
        yield (
            name,
            ", ".join(each.program for each in target.programs) or "none",
            [f"{r.program}: {r.reason}" for r in target.refusals],
        )


def _chart(memory: Timeline) -> str:
    """Return the memory of a call over its nodes as SVG; its texts have the page's color."""
    figure = Figure(figsize=(9, 3), layout="constrained")
    axes: Any = figure.subplots()
    scale = 1 << 20 if memory.peak >= 1 << 20 else 1 << 10
    # Of each run of nodes that a pixel stands for, the one with the most memory.
    width = max(len(memory.nbytes) // _POINTS, 1)
    runs = [range(first, min(first + width, len(memory.nbytes))) for first in range(0, len(memory.nbytes), width)]
    steps = [max(run, key=lambda step: sum(memory.nbytes[step])) for run in runs]
    rows = [[memory.nbytes[step][i] / scale for step in steps] for i in range(len(CATEGORIES))]
    axes.stackplot(steps, *rows, colors=_COLORS)
    axes.set_ylabel("MiB" if scale == 1 << 20 else "KiB", color=_TEXT)
    axes.set_xlabel("operators, in the order in which they run", color=_TEXT)
    axes.tick_params(colors=_TEXT)
    axes.margins(x=0)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(_TEXT)
    if memory.forward < len(memory.nbytes):
        axes.axvline(memory.forward, color=_TEXT, linewidth=0.8, linestyle="--")
        axes.text(*(memory.forward, 0.98), " backward", transform=axes.get_xaxis_transform(), color=_TEXT, va="top")
    figure.patch.set_alpha(0)
    axes.patch.set_alpha(0)
    stream = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": memory.program}):
        FigureCanvasSVG(figure).print_svg(stream, metadata={"Date": None})
    text = stream.getvalue()
    drawing = re.sub(r'width="[\d.]+pt" height="[\d.]+pt"', "", text[text.index("<svg") :])
    shorter = re.sub(r"\d+\.\d{2,}", lambda number: f"{float(number[0]):.1f}", drawing)
    return shorter.replace(_TEXT, "currentColor")


def shown_bytes(nbytes: float) -> str:
    """Return a number of bytes with a unit: `1.5 MiB`."""
    for unit in ("B", "KiB", "MiB"):
        if nbytes < 1024:
            return f"{nbytes:.3g} {unit}" if nbytes < 1000 else f"{nbytes:.0f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.3g} GiB"


def shown_seconds(seconds: float) -> str:
    """Return a time with a unit: `1.5 ms`."""
    unit, scale = next((each for each in (("s", 1), ("ms", 1e3)) if seconds * each[1] >= 1), ("µs", 1e6))
    return f"{seconds * scale:.3g} {unit}"
