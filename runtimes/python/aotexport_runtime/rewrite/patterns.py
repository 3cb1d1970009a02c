"""Values that many small operators compute, by fewer: the same numbers, to rounding. No torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

from msgspec.structs import replace

from aotexport_runtime.rewrite.names import operands
from aotexport_runtime.schema.graph import Node
from aotexport_runtime.schema.values import (
    Argument,
    DType,
    DTypeArgument,
    StringArgument,
    TensorMeta,
    ValueMeta,
)

END = (1 << 63) - 1
RESHAPE, NORM = "aten::reshape.default", "aten::rms_norm.default"
ATTENTION = "aten::scaled_dot_product_attention.default"
_COMMUTATIVE = ("aten::mul.Tensor", "aten::add.Tensor")

_BARE = (
    *("mul.Tensor", "x"),
    ("rsqrt.default", ("add.Tensor", ("mean.dim", ("pow.Tensor_Scalar", "x", 2), [-1], True), "eps")),
)
"""A norm by root mean square: a pattern, see `matches`."""
_WEIGHTED = ("mul.Tensor", "weight", ("rms_norm.default", "x", "sizes", None, "eps"))
_TURNED = [("neg.default", ("slice.Tensor", "x", "axis", "half", END)), ("slice.Tensor", "x", "axis", 0, "half")]
_ROTATED = ("add.Tensor", "before", ("mul.Tensor", ("cat.default", _TURNED, -1), "sine"))
_CUBE = ("mul.Tensor", ("pow.Tensor_Scalar", "x", 3), 0.044715)
_TANH = ("tanh.default", ("mul.Tensor", ("add.Tensor", "x", _CUBE), (2 / 3.141592653589793) ** 0.5))
_GELU = ("mul.Tensor", ("mul.Tensor", "x", 0.5), ("add.Tensor", _TANH, 1))


def shape_of(metas: Mapping[str, ValueMeta], name: Any) -> tuple[Any, ...]:
    """Return the sizes of a tensor; other values have none."""
    meta = metas.get(name) if isinstance(name, str) else None
    return meta.shape if isinstance(meta, TensorMeta) else ()


def matches(pattern: Any, value: Any, by_name: Mapping[str, Node], found: dict[str, Any]) -> bool:
    """Return whether a value is made as a pattern says; `found` gets what its strings stand for.

    A pattern is an operator, its arguments and, as a dict, keyword arguments; a string stands for any one.
    """
    if isinstance(pattern, str):
        return found.setdefault(pattern, value) == value
    if isinstance(pattern, list):
        return isinstance(value, list) and _all_match(cast("list[Any]", pattern), value, by_name, found)
    if not isinstance(pattern, tuple):
        return pattern == value
    op, *expected = cast("tuple[Any, ...]", pattern)
    node = value if isinstance(value, Node) else by_name.get(value) if isinstance(value, str) else None
    named = expected.pop() if expected and isinstance(expected[-1], dict) else {}
    if node is None or node.op != f"aten::{op}" or node.kwargs.keys() != named.keys():
        return False
    for args in (node.args, node.args[::-1])[: 1 + (node.op in _COMMUTATIVE)]:
        given = [*args, *(node.kwargs[name] for name in named)]
        if _all_match([*expected, *named.values()], given, by_name, trial := dict(found)):
            found.update(trial)
            return True
    return False


def _all_match(
    patterns: Sequence[Any], values: Sequence[Any], by_name: Mapping[str, Node], found: dict[str, Any]
) -> bool:
    pairs = zip(patterns, values, strict=False)
    return len(patterns) == len(values) and all(matches(*pair, by_name, found) for pair in pairs)


class Fused:
    """The nodes with norms, rotations of halves, GELU and attention in fewer operators."""

    def __init__(self, nodes: list[Node], metas: Mapping[str, ValueMeta]) -> None:
        """Replace what is known; `metas`: those of all values."""
        self._metas, self._by_name = metas, {node.name: node for node in nodes}
        self._masks: dict[str, str] = {}
        self._signed: set[str] = set()
        self._uses = Counter(name for node in nodes for name in operands(node))
        self.nodes = [each for node in nodes for each in self._replaced(node)]

    def _replaced(self, node: Node) -> Iterator[Node]:
        if node.op == ATTENTION:
            yield from self._attention(node)
            return
        *before, made = self._fewer(node)
        self._by_name[node.name] = made
        yield from (*before, made)

    def _fewer(self, node: Node) -> list[Node]:
        """Return what computes the value of several nodes, of which `node` is the last, by fewer."""
        makers: tuple[tuple[Any, Callable[..., list[Node]]], ...] = (
            (_BARE, self._norm),
            (_WEIGHTED, self._norm),
            (_ROTATED, self._rotation),
            (_GELU, self._gelu),
        )
        if node.op in _COMMUTATIVE and self._dtype(node.name) == "float32":
            for pattern, make in makers:
                found: dict[str, Any] = {}
                if matches(pattern, node, self._by_name, found) and (made := make(node, **found)):
                    return made
        return [node]

    def _made(self, name: Any, op: str) -> Node | None:
        """Return the node that makes a value by the operator `op`; None: another does."""
        node = self._by_name.get(name) if isinstance(name, str) else None
        return node if node is not None and node.op.removeprefix("aten::") == op and not node.kwargs else None

    def _shape(self, name: Any) -> tuple[Any, ...]:
        return shape_of(self._metas, name)

    def _dtype(self, name: Any) -> DType | None:
        meta = self._metas.get(name) if isinstance(name, str) else None
        return meta.dtype if isinstance(meta, TensorMeta) else None

    def _norm(self, node: Node, x: str, eps: Any, sizes: Any = None, weight: Any = None) -> list[Node]:
        width = self._shape(x)[-1:]
        is_known = isinstance(eps, float) and isinstance(width[0], int) and sizes in (None, [*width])
        if not is_known or {*map(self._dtype, (x, weight or x))} != {"float32"}:
            return []
        if weight is not None and self._shape(weight) != width:
            return []
        return [replace(node, op=NORM, args=[x, [*width], weight, eps])]

    def _rotation(self, node: Node, before: str, sine: str, x: str, axis: Any, half: Any) -> list[Node]:
        """Return a sum with the product of a sine, and of halves that changed places, the first one its sign too."""
        shape, signed, rolled = self._shape(x), f"{sine}:signed", f"{node.name}:rolled"
        if not isinstance(half, int) or shape[-1:] != (2 * half,) or axis not in (-1, len(shape) - 1):
            return []
        if self._shape(sine)[-1:] != shape[-1:] or self._shape(before) != shape:
            return []
        if {*map(self._dtype, (before, sine, x))} != {"float32"}:
            return []

        def made(name: str, op: str, *args: Any) -> Node:
            return replace(node, name=name, op=f"aten::{op}", args=[*args], kwargs={})

        first, negative, second = (f"{sine}:{part}" for part in ("first", "negative", "second"))
        once = [
            made(first, "slice.Tensor", sine, -1, 0, half),
            made(negative, "neg.default", first),
            made(second, "slice.Tensor", sine, -1, half, END),
            made(signed, "cat.default", [negative, second], -1),
        ]
        once = [] if sine in self._signed else once
        self._signed.add(sine)
        rotated = made(rolled, "roll.default", x, [half], [-1])
        return [*once, rotated, made(node.name, "addcmul.default", before, rolled, signed)]

    def _gelu(self, node: Node, x: str) -> list[Node]:
        kind: dict[str, Argument] = {"approximate": StringArgument(value="tanh")}
        return [replace(node, op="aten::gelu.default", args=[x], kwargs=kind)]

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
        yield replace(node, name=rows, op=RESHAPE, args=[query, [-1, count, shape[1] // count, shape[3]]], kwargs={})
        yield replace(node, name=many, args=[rows, heads, shared, *rest])
        yield replace(node, op=RESHAPE, args=[many, one], kwargs={})

    def _mask(self, mask: str, node: Node, dtype: DType) -> Iterator[Node]:
        """Yield, once, the nodes that make numbers of a mask, its logarithms: 0 where it holds, else minus infinity."""
        if mask in self._masks:
            return
        ones, self._masks[mask] = f"{mask}:ones", f"{mask}:numbers"
        meta = self._metas[mask]
        assert isinstance(meta, TensorMeta)
        made = replace(node, kwargs={}, meta=replace(meta, dtype=dtype))
        yield replace(made, name=ones, op="aten::to.dtype", args=[mask, DTypeArgument(value=dtype)])
        yield replace(made, name=self._masks[mask], op="aten::log.default", args=[ones])

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
