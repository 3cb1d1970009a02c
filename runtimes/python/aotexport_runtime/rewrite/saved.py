"""Other values to save for the backward of a joint graph than a bundle names. Data only, no torch."""

from __future__ import annotations

from aotexport_runtime.schema.gradients import Partition
from aotexport_runtime.schema.graph import Graph
from aotexport_runtime.schema.program import FunctionalGraph
from aotexport_runtime.validate.arguments import references


def views_recomputed(graph: Graph, functional: FunctionalGraph, partition: Partition) -> Partition:
    """Return `partition` with views replaced by their bases.

    Backward makes the view anew, or often needs none: the transpose of a transposed weight is the weight. A saved base
    has the version that tells of changes; a library returns a view as a tensor of its own.

    Args:
        graph: a joint graph.
        functional: its calling convention. Views of inputs that it changes are saved themselves, since the base has
            other values in backward.
        partition: the saved values.
    """
    nodes = {node.name: node for node in graph.nodes}
    mutated = {graph.inputs[mutation.input_index].name for mutation in functional.mutations}
    bases: set[str] = set()
    checked: set[str] = set()
    for name in partition.saved:
        base = name
        while base in nodes and nodes[base].op in VIEWS:
            source = nodes[base].args[0]
            if not isinstance(source, str) or source in mutated:
                break
            # Sizes of the view may be those of other tensors.
            bases.update(name for argument in nodes[base].args[1:] for name in references(argument))
            base = source
        bases.add(base)
        if name not in partition.unchecked:
            checked.add(base)
    saved = tuple(value.name for value in (*graph.inputs, *graph.nodes) if value.name in bases)
    unchecked = tuple(name for name in saved if name not in checked)
    return Partition(name="views-recomputed", saved=saved, unchecked=unchecked)


def base_of(graph: Graph, name: str) -> str:
    """Return the base of a value of `graph`, whose memory and version it has; itself, where it is no view."""
    nodes = {node.name: node for node in graph.nodes}
    while name in nodes and nodes[name].op in VIEWS and isinstance(source := nodes[name].args[0], str):
        name = source
    return name


VIEWS = frozenset(
    f"aten::{name}"
    for name in (
        *("alias.default", "detach.default", "expand.default", "permute.default", "select.int", "slice.Tensor"),
        *("squeeze.default", "squeeze.dim", "squeeze.dims", "t.default", "transpose.int", "unsqueeze.default"),
        *("view.default", "_unsafe_view.default"),
    )
)
