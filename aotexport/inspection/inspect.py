"""A bundle for a person to read in a terminal: tables around `aotexport_runtime.commands.describe`. No torch."""

from __future__ import annotations

import collections
import math
from collections.abc import Iterator, Mapping

from rich.console import RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from aotexport_runtime.bundle.notes import LOUD, notes_of
from aotexport_runtime.bundle.read import Bundle
from aotexport_runtime.commands.describe import (
    describe_graph,
    describe_program,
    describe_refusals,
    describe_subclass,
    graph_files,
    sections,
    trust_needed,
)
from aotexport_runtime.errors import printable
from aotexport_runtime.schema.graph import Graph
from aotexport_runtime.schema.manifest import Ancestor
from aotexport_runtime.schema.program import Program
from aotexport_runtime.validate.arguments import graphs_of

_SHOWN_OPERATORS = 8


def render(
    bundle: Bundle, *, program: str | None = None, graph: bool = False, files: bool = False
) -> Iterator[RenderableType]:
    """Yield the output of `inspect`, piece by piece, of one program or all."""
    if program is None:
        yield _line(f"{bundle.manifest.name} ({bundle.manifest.kind})", style="bold")
    for note in notes_of(bundle, program):
        yield indented(_line(note.shown(), style="bold yellow" if note.kind in LOUD else "yellow"))
    for name in bundle.program_names if program is None else [program]:
        yield from _program(bundle, bundle.program(name), graph=graph)
    if program is None:
        yield _line("\nbundle", style="bold")
        yield indented(grid(facts(bundle)))
    if files:
        yield _line("\nfiles", style="bold")
        yield indented(_files(bundle))


def _ancestor(ancestor: Ancestor) -> str:
    at = f" as `{ancestor.path}`" if ancestor.path else ""
    changes = f" ({'; '.join(ancestor.changes)})" if ancestor.changes else ""
    return f"{ancestor.name}{at}, sha256 {ancestor.sha256[:12]}{changes}"


def facts(bundle: Bundle) -> dict[str, str]:
    """Return what holds of a whole bundle, by title."""
    manifest = bundle.manifest
    parameters = [entry for entry in manifest.state if entry.role == "parameter"]
    others = collections.Counter(entry.role for entry in manifest.state if entry.role != "parameter")
    elements = sum(math.prod(entry.shape) for entry in parameters)
    nbytes = sum(entry.nbytes for entry in manifest.files)
    rows = {
        "format": f"{manifest.format}, readable from format {manifest.min_reader}",
        "operator set": manifest.operator_set,
        "extensions": ", ".join(manifest.extensions),
        "written by": f"aotexport {manifest.producer.aotexport} with torch {manifest.producer.torch}",
        "parameters": f"{len(parameters)} ({elements:,} elements)",
        **{f"{role}s": str(count) for role, count in sorted(others.items())},
        "tied": "; ".join(" = ".join((entry.name, *entry.tied)) for entry in manifest.state if entry.tied),
        "custom operators of": ", ".join(manifest.requirements.operator_namespaces),
        "classes of tensors": ", ".join(manifest.requirements.tensor_types),
        "subclasses": "; ".join(f"{e.name} is a {describe_subclass(e.subclass)}" for e in manifest.state if e.subclass),
        "trust needed": trust_needed(bundle),
        "recorded calls": str(len(manifest.testvectors)),
        "made of": "; ".join(map(_ancestor, manifest.ancestors)),
        "size": f"{nbytes:,} bytes in {len(manifest.files)} files",
    }
    return {name: value for name, value in rows.items() if value}


def _files(bundle: Bundle) -> Table:
    files = Table("sha256", "bytes", "file", box=None, pad_edge=False)
    files.columns[1].justify = "right"
    for entry in bundle.manifest.files:
        files.add_row(entry.sha256[:12], f"{entry.nbytes:,}", printable(entry.path))
    return files


def _program(bundle: Bundle, program: Program, *, graph: bool) -> Iterator[RenderableType]:
    yield ""
    yield _line(describe_program(bundle, program), style="bold")
    found = sections(bundle, program)
    for title in ("inputs", "outputs", *(["changes"] if found["changes"] else [])):
        yield indented(_section(title, found[title] or ["none"]))
    yield indented(_graphs(bundle, program))
    for line in found["preference"]:
        yield indented(_line(line))
    for line in describe_refusals(bundle, program):
        yield indented(_line(line, style="yellow"))
    names = {dimension.symbol: dimension.name for dimension in program.dimensions}
    for file in graph_files(program) if graph else ():
        yield _line(f"\n{program.name}/{file}", style="bold")
        yield _line("\n".join(describe_graph(bundle.graph(program.name, file), names)))


def _section(title: str, lines: list[str]) -> Table:
    table = Table.grid(padding=(0, 2))
    for index, line in enumerate(lines):
        table.add_row("" if index else title, printable(line))
    return table


def _graphs(bundle: Bundle, program: Program) -> Table:
    table = Table("graph", "operators", "most frequent", box=None, pad_edge=False)
    table.columns[1].justify = "right"
    for file in graph_files(program):
        graph = bundle.graph(program.name, file)
        counts = operator_counts(graph).most_common(_SHOWN_OPERATORS)
        frequent = ", ".join(f"{count} {name.removeprefix('aten::')}" for name, count in counts)
        table.add_row(printable(file), f"{len(graph.nodes):,}", printable(frequent))
    return table


def operator_counts(graph: Graph) -> collections.Counter[str]:
    """Return the number of calls of each operator, by full name, in `graph` and its subgraphs."""
    return collections.Counter(node.op for each in graphs_of(graph) for node in each.nodes)


def _line(text: str, style: str = "") -> Text:
    return Text(printable(text), style=style)


def grid(rows: Mapping[str, str]) -> Table:
    """Return a table of names and values without lines."""
    table = Table.grid(padding=(0, 2))
    for name, value in rows.items():
        table.add_row(name, printable(value))
    return table


def indented(content: RenderableType) -> Padding:
    """Return what stands below a heading."""
    return Padding(content, (0, 0, 0, 2), expand=False)
