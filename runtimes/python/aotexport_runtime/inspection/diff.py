"""Compare two bundles: format, programs, inputs and outputs, operators, weights, files."""

from __future__ import annotations

import collections
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from aotexport_runtime.bundle.read import Bundle
from aotexport_runtime.module.describe import describe_changes, describe_inputs, describe_outputs, graph_files
from aotexport_runtime.schema.graph import Graph
from aotexport_runtime.schema.manifest import StateTensor
from aotexport_runtime.schema.program import Program
from aotexport_runtime.validate.arguments import graphs_of


@dataclass(frozen=True)
class BundleDifference:
    """One difference between two bundles.

    Attributes:
        section: its group: `format`, `programs`, `train: inputs`, `train: joint.json`, `weights`, `files`.
        before: its form in the first bundle; None: it is not there.
        after: its form in the second bundle; None: it is not there.
        unequal: of weights of one kind: number of elements that differ.
        max_abs: of weights of one kind: the largest absolute difference.
    """

    section: str
    name: str
    before: str | None
    after: str | None
    unequal: int | None = None
    max_abs: float | None = None


def diff_bundles(a: Bundle, b: Bundle) -> list[BundleDifference]:
    """Return all differences between two open bundles; none when they are the same."""
    changes = list(_compare("format", _format(a), _format(b)))
    changes += _compare("programs", _programs(a), _programs(b))
    for name in a.program_names:
        if name in b.program_names:
            changes += _program(a, b, name)
    changes += _weights(a, b)
    changes += _compare("files", _files(a), _files(b))
    return changes


def _compare(section: str, before: Mapping[str, str], after: Mapping[str, str]) -> Iterator[BundleDifference]:
    for name in {**before, **after}:
        if before.get(name) != after.get(name):
            yield BundleDifference(section, name, before.get(name), after.get(name))


def _format(bundle: Bundle) -> dict[str, str]:
    manifest = bundle.manifest
    return {
        "format": manifest.format,
        "readable from format": manifest.min_reader,
        "operator set": manifest.operator_set,
        "extensions": ", ".join(manifest.extensions) or "none",
        "calling convention": str(manifest.calling_convention),
        "written by aotexport": manifest.producer.aotexport,
        "written with torch": manifest.producer.torch,
        "name": f"{manifest.name} ({manifest.kind})",
        "mode at export": "train" if manifest.training else "eval",
        "custom operators of": ", ".join(manifest.requirements.operator_namespaces) or "nothing",
    }


def _programs(bundle: Bundle) -> dict[str, str]:
    entries = {entry.name: entry for entry in bundle.manifest.programs}
    return {
        name: f"{bundle.program(name).mode} mode, targets {', '.join(entry.targets)}" for name, entry in entries.items()
    }


def _program(a: Bundle, b: Bundle, name: str) -> Iterator[BundleDifference]:
    before, after = a.program(name), b.program(name)
    for section, describe in {
        "inputs": lambda _, program: describe_inputs(program),
        "outputs": lambda bundle, program: describe_outputs(program, bundle.graph(name, program.forward.file)),
        "changes": lambda _, program: describe_changes(program),
        "refusals": lambda _, program: [f"no {each.graph} graph: {each.reason}" for each in program.refusals],
    }.items():
        yield from _compare(f"{name}: {section}", _keyed(describe(a, before)), _keyed(describe(b, after)))
    files = dict.fromkeys(graph_files(before) + graph_files(after))
    for file in files:
        yield from _compare(f"{name}: {file}", _operators(a, before, file), _operators(b, after, file))


def _keyed(lines: Iterable[str]) -> dict[str, str]:
    """Return lines like `x: float32[b]` and `dimension b in [1:]` by their subject."""
    keyed: dict[str, str] = {}
    for line in lines:
        separator = " in " if line.startswith("dimension ") else ": "
        name, found, value = line.partition(separator)
        keyed[name] = value if found else "present"
    return keyed


def _operators(bundle: Bundle, program: Program, file: str) -> dict[str, str]:
    if file not in graph_files(program):
        return {}
    return {name: str(count) for name, count in sorted(operator_counts(bundle.graph(program.name, file)).items())}


def operator_counts(graph: Graph) -> collections.Counter[str]:
    """Return the number of calls of each operator, by full name, in `graph` and its subgraphs."""
    return collections.Counter(node.op for each in graphs_of(graph) for node in each.nodes)


def _files(bundle: Bundle) -> dict[str, str]:
    return {entry.path: f"{entry.nbytes:,} bytes, sha256 {entry.sha256[:12]}" for entry in bundle.manifest.files}


# --- weights ----------------------------------------------------------------------------------------------


def _weights(a: Bundle, b: Bundle) -> list[BundleDifference]:
    before, after = _state(a), _state(b)
    changes = list(
        _compare("weights", {n: _kind(e) for n, e in before.items()}, {n: _kind(e) for n, e in after.items()})
    )
    changed = {change.name for change in changes}
    same = [name for name in before if name in after and name not in changed]
    if _stored(a) != _stored(b):
        changes += _values(a, b, [before[name] for name in same], [after[name] for name in same])
    return changes


def _state(bundle: Bundle) -> dict[str, StateTensor]:
    return {entry.name: entry for entry in bundle.manifest.state}


def _stored(bundle: Bundle) -> tuple[Any, ...]:
    """Return the facts that determine the values of the state: each tensor's place, and the digests of those files."""
    files = {part.file for entry in bundle.manifest.state for part in (entry, *entry.parts)}
    return bundle.manifest.state, [entry.sha256 for entry in bundle.manifest.files if entry.path in files]


def _kind(entry: StateTensor) -> str:
    grad = ", requires grad" if entry.requires_grad else ""
    tied = f", tied to {', '.join(entry.tied)}" if entry.tied else ""
    persistent = "" if entry.persistent else ", not persistent"
    of = f" of {entry.subclass.type}" if entry.subclass is not None else ""
    return f"{entry.role} {entry.dtype}{list(entry.shape)}{of}{grad}{persistent}{tied}"


def _values(a: Bundle, b: Bundle, before: list[StateTensor], after: list[StateTensor]) -> Iterator[BundleDifference]:
    # Import torch only if needed: bundles of the same weights are compared without it.
    import torch

    from aotexport_runtime.bundle.weights import load_parts, parts_of

    pairs = [
        (x, p, q) for x, y in zip(before, after, strict=True) for p, q in zip(parts_of(x), parts_of(y), strict=True)
    ]
    old = load_parts(a, [record for _, record, _ in pairs])
    new = load_parts(b, [record for _, _, record in pairs])
    for (entry, record, _), tensor, other in zip(pairs, old, new, strict=True):
        if tensor.shape != other.shape:
            yield BundleDifference("weights", record.key, f"part {list(tensor.shape)}", f"part {list(other.shape)}")
            continue
        name = entry.name if entry.subclass is None else record.key
        wide = torch.complex128 if tensor.is_complex() else torch.float64
        x, y = tensor.to(wide), other.to(wide)
        unequal = ~((x == y) | (x.isnan() & y.isnan()))
        if unequal.any():
            largest = (x - y).abs()[unequal].max().item()
            kind = _kind(entry)
            yield BundleDifference("weights", name, kind, kind, unequal=int(unequal.sum()), max_abs=largest)
