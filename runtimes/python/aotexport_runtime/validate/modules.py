"""Rules of submodules, and of the runs of nodes captured of their calls."""

from __future__ import annotations

from keyword import iskeyword

from aotexport_runtime.allowed.modules import is_own_attribute
from aotexport_runtime.errors import Place
from aotexport_runtime.schema.bounded import MAX_NODES, Line
from aotexport_runtime.schema.graph import Graph, ModuleCall
from aotexport_runtime.schema.manifest import Manifest
from aotexport_runtime.schema.trees import Leaf, Mapping, Sequence
from aotexport_runtime.validate.arguments import check_argument, references
from aotexport_runtime.validate.bounds import check_form, check_index
from aotexport_runtime.values.trees import keys_of, leaves

MAX_PARTS = 64


def check_path(path: str, subject: str, where: Place) -> list[str]:
    """Return the parts of a path of submodules."""
    check_form(path, Line, subject, "text-malformed/path", where)
    parts = path.split(".")
    if len(parts) > MAX_PARTS or not all(parts) or "__dict__" in parts:
        raise where.invalid(f"{subject} {path[:80]!r} is malformed", "name-malformed/path")
    return parts


def check_submodules(manifest: Manifest, where: Place) -> None:
    """Refuse submodules out of order, twice, or within themselves, and settings that are something else as well."""
    state = {name for entry in manifest.state for name in (entry.name, *entry.tied)}
    others = state.union(each.name for each in (*manifest.modules, *manifest.attributes))
    for name in manifest.settings:
        if name in others:
            message = f"attribute {name[:80]!r} is listed as something else as well"
            where.at("settings", name).refuse(message, "name-twice/setting")
    with where.at("modules") as here:
        _check_order(manifest, state, here)


def _check_order(manifest: Manifest, state: set[str], place: Place) -> None:
    ended: set[str] = set()
    around: list[str] = []
    for index, record in enumerate(manifest.modules):
        where, subject = place.at(index), f"submodule {record.name[:80]!r}"
        parts = check_path(record.name, "submodule", where) if record.name else []
        while around and around != parts[: len(around)]:
            ended.add(".".join(around))
            around.pop()
        if around != parts[:-1]:
            raise where.invalid(f"{subject} does not follow the one that it is in", "module-malformed/order")
        if record.name in state:
            message = f"{record.name[:80]!r} is the name of a state tensor and of a module"
            raise where.invalid(message, "name-twice/module-and-state")
        if record.same_as is not None and record.same_as not in ended:
            raise where.invalid(f"{subject} is the same as none before it", "module-malformed/same-as")
        if not isinstance(record.attributes, Mapping | None):
            raise where.invalid(f"attributes of {subject} are no mapping", "module-malformed/attributes")
        for name in (*record.absent, *(() if record.attributes is None else keys_of(record.attributes))):
            text = str(name)
            if name != text or not text.isidentifier() or iskeyword(text) or not is_own_attribute(text):
                raise where.invalid(f"{subject} has a malformed attribute {text[:40]!r}", "name-malformed/attribute")
        around = parts


def check_calls(graph: Graph, symbols: set[str], where: Place) -> None:
    """Refuse calls of submodules that are no nested runs of a graph's nodes, or use other values than the graph's."""
    place = where.at("calls")
    if len(graph.calls) > MAX_NODES:
        message = f"{len(graph.calls)} calls of submodules; at most {MAX_NODES} are read"
        raise place.invalid(message, "bundle-limit/calls")
    places = {value.name: -1 for value in graph.inputs}
    places |= {node.name: index for index, node in enumerate(graph.nodes)}
    ends: dict[int | None, int] = {}
    for index, call in enumerate(graph.calls):
        subject, where = f"call {index} of a submodule", place.at(index)
        low, high = 0, len(graph.nodes)
        if call.parent is not None:
            check_index(call.parent, index, f"parent of {subject}", "index-range/call-parent", where)
            low, high = graph.calls[call.parent].begin, graph.calls[call.parent].end
        if not max(low, ends.get(call.parent, 0)) <= call.begin <= call.end <= high:
            message = f"{subject} is no run of nodes after the one before it, in the one around it"
            raise where.invalid(message, "module-malformed/run")
        ends[call.parent] = call.end
        _check_structures(call, places, graph, symbols, subject, where)


def _check_structures(
    call: ModuleCall, places: dict[str, int], graph: Graph, symbols: set[str], subject: str, where: Place
) -> None:
    check_argument(call.values, places, graph.subgraphs, symbols, where)
    if call.arguments is None or call.result is None:
        if call.refusal is None:
            raise where.invalid(f"{subject} has no structure, and no reason why", "module-malformed/call-structure")
        return
    pair = call.arguments.items if isinstance(call.arguments, Sequence) else ()
    if len(pair) != 2 or not isinstance(pair[0], Sequence) or not isinstance(pair[1], Mapping):
        message = f"arguments of {subject} are no pair of positional and keyword arguments"
        raise where.invalid(message, "module-malformed/call-arguments")
    for tree, end in ((call.arguments, call.begin), (call.result, call.end)):
        used = [call.values[leaf.index] for _, leaf in leaves(tree) if isinstance(leaf, Leaf)]
        if any(places[name] >= end for value in used for name in references(value)):
            message = f"{subject} takes or returns a value that is computed after it"
            raise where.invalid(message, "module-malformed/late-value")
