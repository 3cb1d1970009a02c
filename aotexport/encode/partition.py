"""The cut of a joint graph into forward and backward: the set of values saved in between.

A partition is no more than that set; the runtime derives forward and backward from it by reachability.
"""

from __future__ import annotations

from aotexport_runtime.schema.graph import Graph, Node
from aotexport_runtime.schema.values import SequenceMeta, SizeMeta
from aotexport_runtime.validate import references


def saved_values(graph: Graph, returned: int, inputs: int) -> tuple[str, ...]:
    """Return the values that backward takes from forward when nothing is recomputed, in graph order.

    A node belongs to forward if an output of the forward needs it, or if it is a number computed from inputs or other
    such nodes, so that no tensor is saved for its sizes alone. Values of forward and inputs that backward uses are
    saved; of an operator with several results, the used items are.

    Args:
        graph: a joint graph.
        returned: number of outputs that the forward returns.
        inputs: number of inputs that are the program's; the rest are tangents.
    """
    forward = _needed(graph, graph.outputs[:returned])
    backward = _needed(graph, graph.outputs[returned:])
    tuples = {node.name for node in graph.nodes if isinstance(node.meta, SequenceMeta)}
    for node in graph.nodes:
        if node.op == "python::getitem" and node.args and node.args[0] in tuples and node.args[0] in forward:
            forward.add(node.name)
    available = forward | {value.name for value in graph.inputs[:inputs]}
    for node in graph.nodes:
        if isinstance(node.meta, SizeMeta) and available.issuperset(_references(node)):
            forward.add(node.name)
            available.add(node.name)
    used: set[str] = set()
    for node in graph.nodes:
        if node.name in backward and node.name not in forward:
            used.update(name for name in _references(node) if name in available)
    for output in graph.outputs[returned:]:
        used.update(name for name in references(output) if name in available)
    in_order = [value.name for value in (*graph.inputs, *graph.nodes)]
    return tuple(name for name in in_order if name in used and name not in tuples)


def _needed(graph: Graph, outputs: list) -> set[str]:  # type: ignore[type-arg]
    wanted = {name for output in outputs for name in references(output)}
    for node in reversed(graph.nodes):
        if node.name in wanted:
            wanted.update(_references(node))
    return wanted


def _references(node: Node) -> set[str]:
    return {name for argument in (*node.args, *node.kwargs.values()) for name in references(argument)}
