"""Updates of Adam and AdamW as one operator each, where torch has seven. No torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from msgspec.structs import replace

from aotexport_runtime.rewrite.names import names_in, operands, writes_in_place
from aotexport_runtime.rewrite.patterns import matches
from aotexport_runtime.schema.graph import Graph, Node

UPDATE = "aotexport::adam"
"""Operator that updates a parameter; its arguments are those of `execution.updates.adam`."""

_SQUARE = ("addcmul_.default", ("mul_.Tensor", "square", "beta"), "grad", "grad", {"value": "rest"})
_UPDATED = (
    *("addcdiv_.default", "decayed", ("lerp_.Scalar", "mean", "grad", "weight")),
    ("add_.Tensor", ("div.Tensor", ("sqrt.default", _SQUARE), "divisor"), "addend"),
)
_DECAYED = ("mul_.Tensor", "parameter", "kept")


def with_fused_updates(graph: Graph) -> list[Node]:
    """Return the nodes of a graph with each update by the moments of a gradient as one node."""
    by_name = {node.name: node for node in graph.nodes}
    uses = Counter(names_in([*graph.outputs, *(name for node in graph.nodes for name in operands(node))]))
    places = {node.name: index for index, node in enumerate(graph.nodes)}
    made, gone = dict[str, Node](), set[str]()
    for node in graph.nodes:
        found: dict[str, Any] = {}
        if not matches(_UPDATED, node, by_name, found) or not isinstance(found["weight"], float):
            continue
        if not isinstance(found["beta"], float) or found["rest"] != 1 - found["beta"]:
            continue
        if not matches(_DECAYED, found["decayed"], by_name, found):
            found |= {"parameter": found["decayed"], "kept": 1.0}
        leaves = {value for name, value in found.items() if isinstance(value, str) and name != "decayed"}
        state = {found[name] for name in ("parameter", "mean", "square")}
        chain = [*_above(node, by_name, leaves)]
        between = graph.nodes[min(places[each.name] for each in chain) : places[node.name]]
        is_alone = not uses[node.name] and all(uses[each.name] == 1 for each in chain[1:])
        if is_alone and all(_is_number(each, state) for each in between if each not in chain):
            names = ("parameter", "grad", "mean", "square", "weight", "beta", "kept", "divisor", "addend")
            made[node.name] = replace(node, op=UPDATE, args=[found[name] for name in names])
            gone.update(each.name for each in chain[1:])
    return [made.get(node.name, node) for node in graph.nodes if node.name not in gone]


def _above(node: Node, by_name: Mapping[str, Node], leaves: set[str]) -> Iterator[Node]:
    """Yield a node and those that make its operands, down to `leaves`."""
    yield node
    for name in operands(node):
        if name not in leaves:
            yield from _above(by_name[name], by_name, leaves)


def _is_number(node: Node, state: set[Any]) -> bool:
    """Return whether a node computes a number, and of no `state`."""
    is_number = getattr(node.meta, "shape", None) == () and not writes_in_place(node.op)
    return is_number and state.isdisjoint(operands(node))
