"""Rewrites the forward graph of a decoding step: keys and values go into slots of tensors that are there. No torch.

The caller passes each cache with a free last place, and that place. What the graph computes is the same, to rounding:
calls without effect go, norms, rotations and GELU are few operators, groups of query heads are rows of the one key head
that they share, and a row per sequence is a matrix.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass
from typing import Any, cast

from msgspec.structs import replace

from aotexport_runtime.rewrite.names import (
    BY_STRIDES,
    impure_nodes,
    names_in,
    operands,
    rename,
    renamed,
    returned_operand,
    writes_in_place,
)
from aotexport_runtime.rewrite.partition import ancestors
from aotexport_runtime.rewrite.patterns import RESHAPE, Fused, shape_of
from aotexport_runtime.schema.graph import Graph, Node
from aotexport_runtime.schema.values import Argument, SizeArgument, TensorMeta, ValueMeta

_IN_PART = ("aten::contiguous.default", "aten::dropout.default", "aten::expand.default", "aten::slice.Tensor")
"""Operators that return the values of their operand, if all have a place and none is dropped."""
_NEUTRAL = {"aten::add.Tensor": 0, "aten::mul.Tensor": 1}
_INDEX, _ONES = "aten::index.Tensor", ("aten::new_ones.default", "aten::ones.default")
_BY_ROW = tuple(f"aten::{name}.default" for name in ("layer_norm", "linear", "rms_norm"))
_BY_ELEMENT = (
    *(f"aten::{name}.default" for name in ("gelu", "neg", "relu", "sigmoid", "silu", "tanh")),
    *("aten::add.Tensor", "aten::mul.Tensor", "aten::pow.Tensor_Scalar", "aten::sub.Tensor"),
)


@dataclass(frozen=True)
class Decoding:
    """A decoding step.

    Attributes:
        nodes: what computes the scores and fills the slots.
        scores: the scores of the next token.
        grown: name of the cache with a free last place, by name of the graph's input that is the cache without; the
            place has the name that `slot_of` gives.
        turned: name of the transpose of a weight, by name of the graph's input that is the weight.
        factors: name of a weight as the second operand of products, likewise.
    """

    nodes: list[Node]
    scores: Argument
    grown: Mapping[str, str]
    turned: Mapping[str, str]
    factors: Mapping[str, str]


def decoding(graph: Graph, caches: Mapping[str, int]) -> Decoding | None:
    """Return the step of a graph whose outputs are scores, and then the longer caches; None: it is no such graph.

    `caches`: the index of the output that is the longer one, by name of the input.
    """
    if any(node.op.startswith(BY_STRIDES) for node in graph.nodes):
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
    nodes = [_filled(node) if node.name in grown.values() else node for node in nodes]
    # Values of caches have other strides than in the trace.
    nodes = [replace(node, op=RESHAPE) if node.op == "aten::view.default" else node for node in nodes]
    scores, turned, factors = graph.outputs[0], dict[str, str](), dict[str, str]()
    if not own:
        inputs = {value.name for value in graph.inputs}
        rows = _Rows(Fused(nodes, metas).nodes, metas, inputs)
        nodes, scores, turned = rows.nodes, rename(scores, rows.same), rows.turned
        weights = inputs.intersection(str(node.args[-1]) for node in nodes if is_product(node))
        factors = {weight: f"{weight}:factor" for weight in sorted(weights)}
        nodes = [_of_factors(node, factors) for node in nodes]
    given = {value.name for value in graph.inputs} | {*turned.values(), *factors.values()}
    given |= {*grown.values(), *map(slot_of, grown.values())}
    also = {*impure_nodes(graph), *own, *(f"{name}:filled" for name in grown.values())}
    also |= {node.name for node in nodes if node.op.startswith("submodule::")}
    needed, _ = ancestors(nodes, [scores], given, also)
    return Decoding(needed, scores, grown, turned, factors)


def is_product(node: Node) -> bool:
    """Return whether a node is a product of matrices, with a bias or none."""
    return node.op in ("aten::addmm.default", "aten::mm.default") and not node.kwargs


def _of_factors(node: Node, factors: Mapping[str, str]) -> Node:
    factor = factors.get(str(node.args[-1])) if is_product(node) else None
    return node if factor is None else replace(node, args=[*node.args[:-1], factor])


def slot_of(cache: str) -> str:
    """Return the name of the last place of a cache."""
    return f"{cache}:slot"


def _filled(node: Node) -> Node:
    """Return what fills the last place of a cache, in the place of the node that appends one to a shorter cache."""
    args: list[Argument] = [slot_of(node.name), cast("list[Argument]", node.args[0])[1]]
    return replace(node, name=f"{node.name}:filled", op="aten::copy_.default", args=args, kwargs={})


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
    """Return the nodes without those that return an operand as it is, or what another node does."""
    same, by_name, returned = dict[str, str](), dict[str, Node](), set(names_in(graph.outputs))
    axes, nodes = dict[str, str](), list[Node]()
    for original in graph.nodes:
        node = renamed(original, same)
        source = returned_operand(node, by_name.get, metas)
        if node.op == "aten::unsqueeze.default":
            known = axes.setdefault(str(node.args), node.name)
            source = known if known != node.name else None
        elif source is None and (kept := _kept(node, by_name, metas)) is not None:
            source = kept if shape_of(metas, kept) == shape_of(metas, node.name) else None
            if source is None and node.op == _INDEX:
                sizes: list[Argument] = [SizeArgument(value=size) for size in shape_of(metas, node.name)]
                node = replace(node, op=RESHAPE, args=[kept, sizes])
        if source is not None and node.name not in returned and not writes_in_place(node.op):
            same[node.name] = source
            continue
        by_name[node.name] = node
        nodes.append(node)
    return nodes


def _kept(node: Node, by_name: Mapping[str, Node], metas: Mapping[str, ValueMeta]) -> str | None:
    """Return the operand whose values are those of the result, if they have the same places; None: none is."""
    first, second = (*node.args, None, None)[:2]
    if not isinstance(first, str):
        return None
    if node.op in _IN_PART:
        return None if True in (*node.args[2:3], node.kwargs.get("train")) else first
    dtypes = [getattr(metas.get(name), "dtype", None) for name in (first, node.name)]
    if node.op == "aten::__and__.Tensor" and isinstance(second, str) and dtypes[1] == "bool":
        return second if _always_holds(first, by_name) else first if _always_holds(second, by_name) else None
    if node.op == _INDEX and isinstance(second, list):
        sizes, shapes = shape_of(metas, first), [shape_of(metas, index) for index in second]
        ranges = [_range(index, by_name) for index in second]
        axes = [axis for shape in shapes for axis, size in enumerate(shape) if size != 1]
        are_whole = [made is not None and shape_of(metas, made.name) for made in ranges]
        is_in_order = axes == sorted(axes) and {*map(len, shapes)} == {len(shape_of(metas, node.name))}
        return first if is_in_order and are_whole == [(size,) for size in sizes] else None
    is_neutral = isinstance(second, int | float) and second == _NEUTRAL.get(node.op) and not node.kwargs
    return first if is_neutral and dtypes[0] == dtypes[1] else None


def _always_holds(name: str, by_name: Mapping[str, Node]) -> bool:
    """Return whether a mask is true everywhere: ones, or no place of n + 1 is after the place n."""
    node = by_name.get(name)
    if node is None or node.op != "aten::le.Tensor":
        return node is not None and node.op in _ONES
    place, last = _range(node.args[0], by_name), _unstretched(node.args[1], by_name)
    if place is None or last is None or last.op != "aten::add.Tensor":
        return False
    zero, end = _range(last.args[0], by_name), by_name.get(str(place.args[0]))
    is_one_more = end is not None and end.op == "python::add" and end.args == [last.args[1], 1]
    return is_one_more and zero is not None and zero.args == [1]


def _unstretched(name: Argument, by_name: Mapping[str, Node]) -> Node | None:
    """Return the node that makes a value before axes of size 1 are added to it."""
    node = by_name.get(str(name))
    while node is not None and node.op == "aten::unsqueeze.default":
        node = by_name.get(str(node.args[0]))
    return node


def _range(name: Argument, by_name: Mapping[str, Node]) -> Node | None:
    """Return the node that makes the numbers from 0, before axes of size 1 are added to them; None: it makes others."""
    node = _unstretched(name, by_name)
    return node if node is not None and node.op == "aten::arange.default" and len(node.args) == 1 else None


class _Rows:
    """The nodes over matrices, (sequences, width), in the place of values of a row per sequence, (sequences, 1, width).

    Changes of shape that follow each other are one. `same`: values that others are; `turned`: transposes, by weight.
    """

    def __init__(self, nodes: list[Node], metas: Mapping[str, ValueMeta], inputs: Set[str]) -> None:
        self._inputs, self.turned = inputs, dict[str, str]()
        self._metas, self._matrices, self._shapes = metas, dict[str, str](), dict[str, list[int]]()
        self._sources, self.same = dict[str, str](), dict[str, Argument]()
        self.nodes = [each for node in nodes for each in self._replaced(renamed(node, self.same))]

    def _replaced(self, node: Node) -> Iterator[Node]:
        name, shape = node.name, self._shape(node.name)
        first = node.args[0] if node.args and isinstance(node.args[0], str) else ""
        if first and shape and self._keeps_order(node, first):
            source = self._sources[name] = self._sources.get(first, first)
            if _is_row(shape):
                yield from self._reshaped(node, source, shape)
            elif self._shape(source) == shape:
                self.same[name] = source
            else:
                yield replace(node, op=RESHAPE, args=[source, [*shape]], kwargs={})
        elif node.op == "aten::select.int" and first in self._matrices and node.args[1:] in ([1, -1], [1, 0]):
            self.same[name] = self._matrices[first]
        elif _is_row(shape) and (rows := self._rows(node)):
            for each in rows:
                if each not in self._matrices:
                    yield from self._reshaped(replace(node, name=each), each, self._shape(each))
            matrices = {each: self._matrices[each] for each in rows}
            yield from self._matrix(renamed(node, matrices), shape)
        else:
            yield node

    def _shape(self, name: Any) -> list[int]:
        """Return the sizes of a value, -1 for one that is dynamic; none: it has several such."""
        known = [size if isinstance(size, int) else -1 for size in shape_of(self._metas, name)]
        return self._shapes.get(name, known if known.count(-1) < 2 else [])

    def _keeps_order(self, node: Node, first: str) -> bool:
        """Return whether the elements of a result follow each other as those of its first operand."""
        shape, axes = self._shape(first), cast("list[int]", node.args[1:])
        return node.op == RESHAPE or (
            node.op == "aten::transpose.int" and bool(shape) and 1 in (shape[axis] for axis in axes)
        )

    def _rows(self, node: Node) -> list[str]:
        """Return the operands of which each row makes one of the result; none: another node."""
        taken = operands(node)
        if node.op in _BY_ROW:
            return taken[:1] if _is_row(self._shape(taken[0])) else []
        rows = [each for each in taken if _is_row(self._shape(each))]
        others = [shape_of(self._metas, each) for each in taken if each not in rows]
        is_known = node.op in _BY_ELEMENT and not node.kwargs.keys() - {"approximate"}
        return rows if is_known and all(len(each) < 2 for each in others) and self._matrices.keys() & rows else []

    def _reshaped(self, node: Node, source: str, shape: list[int]) -> Iterator[Node]:
        """Yield the matrix of a value with the elements of `source`."""
        matrix = [shape[0], shape[2]]
        if self._shape(source) == matrix:
            self._matrices[node.name] = source
            yield replace(node, op=RESHAPE, args=[source, [*shape]], kwargs={})
        else:
            yield from self._matrix(replace(node, op=RESHAPE, args=[source, [*matrix]], kwargs={}), shape)

    def _matrix(self, node: Node, shape: list[int]) -> Iterator[Node]:
        """Yield a node that computes the matrix of a value, and the value of it, for those that want it."""
        matrix = self._matrices[node.name] = self._sources[node.name] = f"{node.name}:rows"
        self._shapes[matrix] = [shape[0], shape[2]]
        yield replace(self._product(node), name=matrix)
        yield replace(node, op=RESHAPE, args=[matrix, [*shape]], kwargs={})

    def _product(self, node: Node) -> Node:
        """Return a linear layer as the product with the transpose of its weight, which is made once."""
        weight: Any = node.args[1] if len(node.args) > 1 else None
        if node.op != "aten::linear.default" or weight not in self._inputs:
            return node
        factors: list[Argument] = [node.args[0], self.turned.setdefault(weight, f"{weight}:turned")]
        bias = [each for each in node.args[2:] if each is not None]
        return replace(node, op=f"aten::{'addmm' if bias else 'mm'}.default", args=[*bias, *factors])


def _is_row(shape: list[int]) -> bool:
    return len(shape) == 3 and shape[1] == 1
