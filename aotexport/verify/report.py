"""The report of an export: a record, its summary as data, and as text."""

from __future__ import annotations

import io
import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from aotexport.process.clock import peak_memory_nbytes
from aotexport.verify.comparisons import Comparison
from aotexport_runtime.bundle.notes import LOUD, BundleNote
from aotexport_runtime.errors import printable
from aotexport_runtime.schema.manifest import Manifest
from aotexport_runtime.schema.program import ArgumentInput, Program

if TYPE_CHECKING:
    from aotexport.encode.program import EncodedProgram

_SHOWN = {"output": 8, "gradient": 5, "state": 5}
_REST = {"output": "outputs", "gradient": "gradients", "state": "buffers and inputs after the call"}
_CALL = re.compile(r"call \d+: ")


@dataclass(repr=False)
class ExportReport:
    """The report of an export; printed, it is some lines of text.

    Attributes:
        path: directory of the bundle.
        manifest: its manifest.
        programs: its programs, as encoded.
        comparisons: verified values with their errors; empty without verification.
        seconds: wall time per stage.
        notes: restrictions on calls, needs of a load, and effects that the bundle lacks; each reads as a sentence.
    """

    path: Path
    manifest: Manifest
    programs: list[EncodedProgram]
    comparisons: list[Comparison] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)
    notes: list[BundleNote] = field(default_factory=list)

    def __repr__(self) -> str:
        """Return what the command prints: contents of the bundle, largest errors, notes, and time."""
        return as_text(of_command(summarize(self, verified=bool(self.comparisons)), self.path, self.seconds))


def summarize(report: ExportReport, *, verified: bool) -> dict[str, Any]:
    """Return what the document for `--json` says of a bundle, and whether it was compared with eager execution."""
    manifest = report.manifest
    parameters = [entry for entry in manifest.state if entry.role == "parameter"]
    targets = {entry.name: list(entry.targets) for entry in manifest.programs}
    return {
        "name": manifest.name,
        "kind": manifest.kind,
        "parameters": {"tensors": len(parameters), "elements": sum(math.prod(entry.shape) for entry in parameters)},
        "files": len(manifest.files),
        "bytes": sum(entry.nbytes for entry in manifest.files),
        "programs": [
            {
                "name": program.record.name,
                "mode": program.record.mode,
                "targets": targets[program.record.name],
                "operators": {file.removesuffix(".json"): len(graph.nodes) for file, graph in program.graphs.items()},
                "refusals": [{"graph": r.graph, "reason": r.reason} for r in program.record.refusals],
            }
            for program in report.programs
        ],
        "fixed": _fixed(report.programs[0].record),
        "verified": verified,
        "verified_calls": manifest.verification,
        "verification": largest_errors(report.comparisons),
        "notes": [note.as_json() for note in report.notes],
    }


def costs(report: ExportReport) -> dict[str, dict[str, float]]:
    """Return bytes and seconds of what an export for serving adds: ONNX models without weights, and libraries."""
    parts = {
        "ONNX models": (lambda path: path.endswith(".onnx"), ("ONNX",)),
        "libraries": (lambda path: path.startswith("targets/cpu-"), (": cpu-", "compiled programs")),
    }
    found: dict[str, dict[str, float]] = {}
    for name, (is_of, stages) in parts.items():
        nbytes = sum(entry.nbytes for entry in report.manifest.files if is_of(entry.path))
        seconds = sum(s for stage, s in report.seconds.items() if any(part in stage for part in stages))
        found[name] = {"bytes": nbytes, "seconds": round(seconds, 3)}
    return found


def _fixed(program: Program) -> dict[str, list[int]]:
    """Return the shapes of inputs that have sizes, of which no call may change one."""
    shapes = {spec.path: spec.meta.shape for spec in program.inputs if isinstance(spec, ArgumentInput)}
    return {
        path: [size for size in shape if isinstance(size, int)]
        for path, shape in shapes.items()
        if shape and all(isinstance(size, int) for size in shape)
    }


def of_command(
    summary: Mapping[str, Any], path: Path, seconds: Mapping[str, float], own_nbytes: int = 0
) -> dict[str, Any]:
    """Return the document for `--json`: what it says of the bundle, where that is, and what the command took.

    `seconds` is wall time per stage. `own_nbytes` is the most memory without mapped files; 0: the system does not tell.
    """
    rounded = {stage: round(value, 3) for stage, value in seconds.items()}
    memory = {"peak_memory_bytes": peak_memory_nbytes(), "memory_without_files_bytes": own_nbytes or None}
    return {"path": str(path), **summary, **memory, "seconds": rounded}


def largest_errors(comparisons: Iterable[Comparison]) -> list[dict[str, Any]]:
    """Return the largest error per compared value of a program, over all recorded calls."""
    found: dict[tuple[str, ...], dict[str, Any]] = {}
    for comparison in comparisons:
        value = _CALL.sub("", comparison.name, count=1).removesuffix(" norm")
        names = {"program": comparison.program, "target": comparison.target, "value": value}
        numbers = {"error": 0.0, "absolute": 0.0, "comparisons": 0}
        row = found.setdefault(tuple(names.values()), {**names, "kind": _kind(value), **numbers})
        row["error"] = max(row["error"], comparison.error)
        row["absolute"] = max(row["absolute"], comparison.absolute)
        row["comparisons"] += 1
    return list(found.values())


def _kind(value: str) -> str:
    if value.startswith("gradient of "):
        return "gradient"
    return "state" if value.startswith("state ") or value.endswith(" afterwards") else "output"


# --- text -------------------------------------------------------------------------------------------------


def as_text(summary: Mapping[str, Any]) -> str:
    """Return a summary as plain text."""
    console = Console(file=io.StringIO(), width=200, highlight=False, markup=False)
    print_summary(console, summary)
    return console.file.getvalue().rstrip()  # type: ignore[attr-defined]


def print_summary(console: Console, summary: Mapping[str, Any]) -> None:
    """Print a summary for a person."""
    parameters = summary["parameters"]
    console.print(
        f"{summary['path']}: {printable(summary['name'])} ({summary['kind']}), {parameters['tensors']} parameters "
        f"({parameters['elements']:,} elements), {summary['bytes']:,} bytes in {summary['files']} files",
        soft_wrap=True,
    )
    console.print()
    console.print(_programs(summary["programs"]))
    for program in summary["programs"]:
        for refusal in program["refusals"]:
            reason = printable(f"{program['name']}: no {refusal['graph']} graph, the forward graph runs instead: ")
            console.print(reason + printable(refusal["reason"]), style="yellow", soft_wrap=True)
    console.print()
    if not summary["verified"]:
        console.print("not verified (--no-verify)", style="yellow")
    else:
        console.print(verification_table(summary["verification"]))
    if summary["verified_calls"] == "fast":
        console.print("verified in fewer calls than usual (--fast)", style="yellow")
    for note in summary["notes"]:
        style = "bold yellow" if note["kind"] in LOUD else "yellow"
        console.print(printable(note["sentence"]), style=style, soft_wrap=True)
    if summary["fixed"]:
        inputs = ", ".join(f"{path}{shape}" for path, shape in summary["fixed"].items())
        option = json.dumps(f"{next(iter(summary['fixed']))}:0=batch")
        console.print(
            f"sizes are fixed as in the example: {printable(inputs)}; `--dynamic {option}` for others", soft_wrap=True
        )
    for name, cost in summary.get("costs", {}).items():
        if cost["bytes"]:
            console.print(f"for serving: {name}, {cost['bytes']:,} bytes, {cost['seconds']:.1f} s")
    seconds = sum(summary["seconds"].values())
    console.print(f"\n{seconds:.1f} s, {summary['peak_memory_bytes'] / 1e9:.1f} GB of memory at most")
    path = printable(summary["path"])
    console.print(
        f"next: `aotexport inspect {path}`; in Python `aotexport_runtime.load({path!r})` is the module", soft_wrap=True
    )


def print_warnings(console: Console, summary: Mapping[str, Any]) -> None:
    """Print what a person should know of a bundle even where the rest is not wanted."""
    for note in summary["notes"]:
        if note["kind"] in LOUD:
            console.print(printable(note["sentence"]), style="bold yellow", soft_wrap=True)


def _programs(programs: Iterable[Mapping[str, Any]]) -> Table:
    table = Table("program", "mode", "targets", "operators", box=None, pad_edge=False)
    for program in programs:
        operators = ", ".join(f"{count} {graph}" for graph, count in program["operators"].items())
        table.add_row(printable(program["name"]), program["mode"], ", ".join(program["targets"]), operators)
    return table


def verification_table(rows: list[dict[str, Any]]) -> Table | str:
    """Return the values that differ, with their largest errors, as a table; a sentence where none does."""
    different = [row for row in rows if row["error"]]
    if not different:
        return f"equal to eager in {sum(row['comparisons'] for row in rows)} comparisons"
    compared = f"compared with eager: {len(different)} of {len(rows)} values differ"
    table = Table("program", compared, "relative error", "absolute error", box=None, pad_edge=False)
    for key in dict.fromkeys((row["program"], row["target"], row["kind"]) for row in different):
        program, target, kind = key
        same = sorted(
            (row for row in different if (row["program"], row["target"], row["kind"]) == key),
            key=lambda row: -row["error"],
        )
        worth = same if target == "onnx" else same[: _SHOWN[kind]]
        if target not in ("portable", "autograd"):
            program = f"{program} ({printable(target)})"
        for row in worth:
            table.add_row(program, printable(row["value"]), f"{row['error']:.1e}", f"{row['absolute']:.1e}")
        rest = same[len(worth) :]
        if rest:
            most = max(row["absolute"] for row in rest)
            counted = f"{len(rest)} more {_REST[kind]}"
            table.add_row(program, counted, f"≤ {rest[0]['error']:.1e}", f"≤ {most:.1e}")
    return table
