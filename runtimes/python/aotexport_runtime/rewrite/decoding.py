"""Rewrites the forward graph of a decoding step: keys and values go into slots of tensors that are there. No torch.

The caller passes each cache with a free last place. What the graph computes is the same, to rounding: calls without
effect go, norms by root mean square are one operator, groups of query heads are rows of the one key head that they
share.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

from msgspec.structs import replace

from aotexport_runtime.rewrite.names import impure_nodes, names_in, operands, renamed, returned_operand, writes_in_place
from aotexport_runtime.rewrite.partition import ancestors
from aotexport_runtime.schema.graph import Graph, Node
from aotexport_runtime.schema.values import Argument, DType, DTypeArgument, FloatArgument, TensorMeta, ValueMeta

_END = (1 << 63) - 1
_ATTENTION = "aten::scaled_dot_product_attention.default"
_RESHAPE = "aten::reshape.default"
_COPY = "aten::contiguous.default"
_BY_STRIDES = ("aten::as_strided", "aten::view.dtype", "aten::view_as")
"""Operators whose results depend on the layout of their operand."""


@dataclass(frozen=True)
class Decoding:
    """A decoding step.

    Attributes:
        nodes: what computes the scores and fills the slots.
        scores: the scores of the next token.
        grown: name of the cache with a free last place, by name of the graph's input that is the cache without.
    """

    nodes: list[Node]
    scores: Argument
    grown: Mapping[str, str]


def decoding(graph: Graph, caches: Mapping[str, int]) -> Decoding | None:
    """Return the step of a graph whose outputs are scores, and then the longer caches; None: it is no such graph.

    `caches`: the index of the output that is the longer one, by name of the input.
    """
    if any(node.op.startswith(_BY_STRIDES) for node in graph.nodes):
        return None
    by_name, grown = {node.name: node for node in graph.nodes}, dict[str, str]()
    for name, index in caches.items():
        longer = graph.outputs[index]
        if longer == name:
            continue
        node = by_name.get(str(longer))
        if node is None or not _appends(node, name):
            return None
        grown[name] = node.name
    own = {node.name for node in graph.nodes if writes_in_place(node.op) and not _is_of_a_copy(node, graph, by_name)}
    metas: dict[str, ValueMeta] = {value.name: value.meta for value in (*graph.inputs, *graph.nodes)}
    nodes = list(graph.nodes) if own else _without_effect(graph, metas)
    slots = {node.name: _slot(node) for node in nodes if node.name in grown.values()}
    nodes = [each for node in nodes for each in slots.get(node.name, [node])]
    if not own:
        nodes = _Fused(nodes, metas).nodes
    # Values of caches have other strides than in the trace.
    nodes = [replace(node, op=_RESHAPE) if node.op == "aten::view.default" else node for node in nodes]
    also = {*impure_nodes(graph), *own, *(node.name for node in nodes if node.op.startswith("submodule::"))}
    also |= {*(each[1].name for each in slots.values())}
    needed, _ = ancestors(nodes, graph.outputs[:1], {value.name for value in graph.inputs} | {*slots}, also)
    return Decoding(needed, graph.outputs[0], grown)


def _slot(node: Node) -> list[Node]:
    """Return what fills the last place of a cache, in the place of the node that appends one to a shorter cache."""
    slot, items = f"{node.name}:slot", cast("list[Argument]", node.args[0])
    view = replace(node, name=slot, op="aten::slice.Tensor", args=[node.name, 2, -1, _END], kwargs={})
    return [view, replace(node, name=f"{slot}:filled", op="aten::copy_.default", args=[slot, items[1]], kwargs={})]


def _appends(node: Node, cache: str) -> bool:
    """Return whether a node appends one place to a cache, (batch, heads, length, size)."""
    items, axis = node.args[0], [*node.args[1:], *node.kwargs.values()]
    is_whole = isinstance(node.meta, TensorMeta) and len(node.meta.shape) == 4
    return node.op == "aten::cat.default" and is_whole and axis in ([2], [-2]) and _starts(items, cache)


def _starts(items: Any, cache: str) -> bool:
    return isinstance(items, list) and len(items) == 2 and items[0] == cache and items[1] != cache


def _is_of_a_copy(node: Node, graph: Graph, by_name: Mapping[str, Node]) -> bool:
    """Return whether a node changes a fresh copy that nothing else reads, and nothing reads its result."""
    made = by_name.get(str(node.args[0]))
    uses = Counter(names_in([*graph.outputs, *(name for each in graph.nodes for name in operands(each))]))
    return made is not None and made.op == "aten::lift_fresh_copy.default" and uses[made.name] + uses[node.name] == 1


def _without_effect(graph: Graph, metas: Mapping[str, ValueMeta]) -> list[Node]:
    """Return the nodes without those that return an operand as it is."""
    same, by_name, returned = dict[str, str](), dict[str, Node](), set(names_in(graph.outputs))
    nodes: list[Node] = []
    for original in graph.nodes:
        node = renamed(original, same)
        source = returned_operand(node, by_name.get, metas)
        if source is None and node.op in (_COPY, "aten::slice.Tensor") and isinstance(node.args[0], str):
            is_whole = node.op == _COPY or node.args[2:] == [0, _END]
            source = node.args[0] if is_whole and metas[node.args[0]] == node.meta else None
        if source is not None and node.name not in returned and not writes_in_place(node.op):
            same[node.name] = source
            continue
        by_name[node.name] = node
        nodes.append(node)
    return nodes


class _Fused:
    """The nodes with norms and attention in fewer operators."""

    def __init__(self, nodes: list[Node], metas: Mapping[str, ValueMeta]) -> None:
        self._metas, self._by_name = metas, {node.name: node for node in nodes}
        self._masks: dict[str, str] = {}
        self._uses = Counter(name for node in nodes for name in operands(node))
        self.nodes = [each for node in nodes for each in self._replaced(node)]

    def _replaced(self, node: Node) -> Iterator[Node]:
        if node.op == _ATTENTION:
            yield from self._attention(node)
            return
        made = self._norm(node) or node
        self._by_name[node.name] = made
        yield made

    def _made(self, name: Any, op: str) -> Node | None:
        """Return the node that makes a value by the operator `op`; None: another does."""
        node = self._by_name.get(name) if isinstance(name, str) else None
        return node if node is not None and node.op.removeprefix("aten::") == op and not node.kwargs else None

    def _shape(self, name: Any) -> tuple[Any, ...]:
        meta = self._metas.get(name) if isinstance(name, str) else None
        return meta.shape if isinstance(meta, TensorMeta) else ()

    def _norm(self, node: Node) -> Node | None:
        """Return a product as a norm by root mean square, or as one with a weight; None: it is neither."""
        if node.op != "aten::mul.Tensor" or node.kwargs:
            return None
        for source, factor in (node.args, node.args[::-1]):
            found = self._weighted(node, source, factor) or self._bare(node, source, factor)
            if found is not None:
                return found
        return None

    def _weighted(self, node: Node, weight: Any, factor: Any) -> Node | None:
        norm = self._made(factor, "rms_norm.default")
        if norm is None or norm.args[2] is not None or self._uses[norm.name] > 1:
            return None
        if [*self._shape(weight)] != norm.args[1] or self._dtype(weight) != self._dtype(norm.name):
            return None
        return replace(norm, name=node.name, args=[*norm.args[:2], weight, norm.args[3]], meta=node.meta)

    def _bare(self, node: Node, source: Any, factor: Any) -> Node | None:
        inverse = self._made(factor, "rsqrt.default")
        shifted = inverse and self._made(inverse.args[0], "add.Tensor")
        mean = shifted and self._made(shifted.args[0], "mean.dim")
        square = mean and self._made(mean.args[0], "pow.Tensor_Scalar")
        if not (shifted and mean and square) or square.args != [source, 2] or mean.args[1:] != [[-1], True]:
            return None
        width, kinds = self._shape(source)[-1:], {self._dtype(source), self._dtype(node.name)}
        if kinds != {"float32"} or not isinstance(shifted.args[1], float) or not isinstance(width[0], int):
            return None
        return replace(node, op="aten::rms_norm.default", args=[source, [width[0]], None, shifted.args[1]])

    def _dtype(self, name: Any) -> DType | None:
        meta = self._metas.get(name) if isinstance(name, str) else None
        return meta.dtype if isinstance(meta, TensorMeta) else None

    def _attention(self, node: Node) -> Iterator[Node]:
        """Yield attention with a mask of numbers, which all layers share, over heads that are not repeated."""
        query, keys, values, *rest = node.args
        number = self._dtype(query)
        if rest and isinstance(rest[0], str) and self._dtype(rest[0]) == "bool" and number is not None:
            yield from self._mask(rest[0], node, number)
            rest = [self._masks[rest[0]], *rest[1:]]
        shape, mask = self._shape(query), node.args[3] if rest else None
        heads, shared = self._unrepeated(keys), self._unrepeated(values)
        plain = not any(rest[1:]) and not {*node.kwargs} - {"scale"} and len(shape) == 4 and shape[2] == 1
        if heads is None or shared is None or not plain or (mask is not None and self._shape(mask)[1:2] != (1,)):
            yield replace(node, args=[query, keys, values, *rest])
            return
        count = self._shape(heads)[1]
        rows, many, one = f"{node.name}:rows", f"{node.name}:groups", [-1, shape[1], 1, shape[3]]
        yield replace(node, name=rows, op=_RESHAPE, args=[query, [-1, count, shape[1] // count, shape[3]]], kwargs={})
        yield replace(node, name=many, args=[rows, heads, shared, *rest])
        yield replace(node, op=_RESHAPE, args=[many, one], kwargs={})

    def _mask(self, mask: str, node: Node, dtype: DType) -> Iterator[Node]:
        """Yield, once, the nodes that make numbers of a mask: 0 where it holds, else minus infinity."""
        if mask in self._masks:
            return
        zeros, hidden, self._masks[mask] = (f"{mask}:{part}" for part in ("zeros", "hidden", "numbers"))
        made, meta = replace(node, kwargs={}), self._metas[mask]
        assert isinstance(meta, TensorMeta)
        numbers = replace(meta, dtype=dtype)
        yield replace(made, name=hidden, op="aten::logical_not.default", args=[mask], meta=meta)
        kind: dict[str, Argument] = {"dtype": DTypeArgument(value=dtype)}
        yield replace(made, name=zeros, op="aten::zeros_like.default", args=[mask], kwargs=kind, meta=numbers)
        args: list[Argument] = [zeros, hidden, FloatArgument(value="-inf")]
        yield replace(made, name=self._masks[mask], op="aten::masked_fill.Scalar", args=args, meta=numbers)

    def _unrepeated(self, name: Any) -> str | None:
        """Return the keys or values of which each head was repeated; None: they were not."""
        whole = self._made(name, "reshape.default")
        spread = whole and self._made(whole.args[0], "expand.default")
        several = spread and self._made(spread.args[0], "unsqueeze.default")
        if not whole or not several or several.args[1:] != [2] or not isinstance(several.args[0], str):
            return None
        before, between, after = map(self._shape, (several.args[0], whole.args[0], whole.name))
        if len(before) != 4 or len(after) != 4 or not isinstance(before[1], int) or not isinstance(after[1], int):
            return None
        is_repeat = between == (*before[:2], after[1] // before[1], *before[2:]) and before[2:] == after[2:]
        return several.args[0] if is_repeat else None
