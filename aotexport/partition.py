"""The cut of a joint graph in forward and backward: which values are saved in between.

A partition is no more than that set; the runtime derives both halves from it by reachability.
"""

from __future__ import annotations

from aotexport_runtime.schema.graph import Graph
from aotexport_runtime.schema.values import SequenceMeta
from aotexport_runtime.validate import references


def saved_values(graph: Graph, returned: int, inputs: int) -> tuple[str, ...]:
    """Return the values that backward takes from forward when nothing is recomputed, in graph order.

    A node belongs to forward when an output of the forward needs it. Backward may use forward values and
    inputs: those are saved, except that of an operator with several results the used items are saved.

    Args:
        graph: a joint graph.
        returned: how many of its outputs the forward returns.
        inputs: how many of its inputs are the program's; the rest are tangents.
    """
    forward = _needed(graph, graph.outputs[:returned])
    backward = _needed(graph, graph.outputs[returned:])
    tuples = {node.name for node in graph.nodes if isinstance(node.meta, SequenceMeta)}
    for node in graph.nodes:
        if node.op == "python::getitem" and node.args and node.args[0] in tuples and node.args[0] in forward:
            forward.add(node.name)
    available = forward | {value.name for value in graph.inputs[:inputs]}
    used: set[str] = set()
    for node in graph.nodes:
        if node.name in backward and node.name not in forward:
            for argument in (*node.args, *node.kwargs.values()):
                used.update(name for name in references(argument) if name in available)
    for output in graph.outputs[returned:]:
        used.update(name for name in references(output) if name in available)
    in_order = [value.name for value in (*graph.inputs, *graph.nodes)]
    return tuple(name for name in in_order if name in used and name not in tuples)


def views_recomputed(
    graph: Graph, saved: tuple[str, ...], unchecked: frozenset[str], mutated: set[str]
) -> tuple[str, ...]:
    """Return other values to save: in place of a view, what it is a view of, in graph order.

    A compiled forward returns a view as a tensor of its own, whose version does not tell of a change of its base.

    Args:
        graph: a joint graph.
        saved: values saved otherwise.
        unchecked: those among them whose version is not checked; they stay.
        mutated: inputs that the epilogue changes; what is seen through them afterwards is not what forward saw.
    """
    nodes = {node.name: node for node in graph.nodes}
    kept: set[str] = set()
    for name in saved:
        base = name
        while base in nodes and nodes[base].op in _VIEWS and name not in unchecked:
            source = nodes[base].args[0]
            if not isinstance(source, str) or source in mutated:
                break
            base = source
        kept.add(base)
    return tuple(value.name for value in (*graph.inputs, *graph.nodes) if value.name in kept)


_VIEWS = frozenset(
    f"aten::{name}"
    for name in (
        *("alias.default", "detach.default", "expand.default", "permute.default", "select.int", "slice.Tensor"),
        *("squeeze.default", "squeeze.dim", "squeeze.dims", "t.default", "transpose.int", "unsqueeze.default"),
        *("view.default", "_unsafe_view.default"),
    )
)


def _needed(graph: Graph, outputs: list) -> set[str]:  # type: ignore[type-arg]
    wanted = {name for output in outputs for name in references(output)}
    for node in reversed(graph.nodes):
        if node.name in wanted:
            for argument in (*node.args, *node.kwargs.values()):
                wanted.update(references(argument))
    return wanted
