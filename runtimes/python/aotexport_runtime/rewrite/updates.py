"""Updates of Adam and AdamW as one operator each, where torch has seven. No torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from msgspec.structs import replace

from aotexport_runtime.rewrite.names import names_in, operands, writes_in_place
from aotexport_runtime.schema.graph import Graph, Node

UPDATE = "optimizer::adam"
"""Operator that updates a parameter; its arguments are those of `execution.updates.adam`."""

_SCALE, _LAST = "aten::mul_.Tensor", "aten::addcdiv_.default"
_CHAIN = {
    "aten::add_.Tensor": 2,
    "aten::div_.Tensor": 0,
    "aten::sqrt.default": 0,
    "aten::addcmul_.default": 0,
    _SCALE: 0,
}
"""Operators from the last one back to the first write of the second moment, with the place of each in the next."""


def with_fused_updates(graph: Graph) -> list[Node]:
    """Return the nodes of a graph with each update by the moments of a gradient as one node."""
    by_name = {node.name: node for node in graph.nodes}
    uses = Counter(names_in([*graph.outputs, *(name for node in graph.nodes for name in operands(node))]))
    places = {node.name: index for index, node in enumerate(graph.nodes)}
    made, gone = dict[str, Node](), set[str]()
    for node in graph.nodes:
        chain = _chain(node, by_name) if node.op == _LAST else None
        if chain is None or uses[node.name] or any(uses[each.name] != 1 for each in chain[1:]):
            continue
        first, last = min(places[each.name] for each in chain), places[node.name]
        if all(_is_number(each) for each in graph.nodes[first:last] if each not in chain):
            made[node.name] = _fused(chain)
            gone.update(each.name for each in chain[1:])
    return [made.get(node.name, node) for node in graph.nodes if node.name not in gone]


def _is_number(node: Node) -> bool:
    return getattr(node.meta, "shape", None) == () and not writes_in_place(node.op)


def _chain(node: Node, by_name: dict[str, Node]) -> list[Node] | None:
    """Return the nodes of an update, from the last; the first moment's and the decay's come after `_CHAIN`."""
    chain = [node]
    for op, place in _CHAIN.items():
        source = by_name.get(str(chain[-1].args[place]))
        if source is None or source.op != op:
            return None
        chain.append(source)
    square, scaled = chain[-2:]
    moment, decay = by_name.get(str(node.args[1])), by_name.get(str(node.args[0]))
    if moment is None or moment.op != "aten::lerp_.Scalar" or moment.args[1:2] * 2 != square.args[1:]:
        return None
    beta, weight = scaled.args[1], moment.args[2]
    if not isinstance(beta, float) or not isinstance(weight, float) or square.kwargs != {"value": 1 - beta}:
        return None
    if any(each.kwargs for each in chain if each is not square):
        return None
    return [*chain, moment] if decay is None or decay.op != _SCALE or decay.kwargs else [*chain, moment, decay]


def _fused(chain: Sequence[Node]) -> Node:
    last, plus, over, _, _, scaled, moment, *decays = chain
    kept = decays[0].args[:2] if decays else [last.args[0], 1.0]
    state = [kept[0], moment.args[1], moment.args[0], scaled.args[0]]
    return replace(last, op=UPDATE, args=[*state, moment.args[2], scaled.args[1], kept[1], over.args[1], plus.args[1]])
