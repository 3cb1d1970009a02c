"""Results written over operands that nothing else can see any more: fresh memory costs more than cheap arithmetic.

The operand dies at the call, has the result's layout, and lies in memory of the subgraph that no living value shares.
"""

from __future__ import annotations

from collections.abc import Callable, Set
from dataclasses import dataclass, field

import msgspec

from aotexport_runtime.rewrite.names import LAYER, last_uses, names_in, operands
from aotexport_runtime.rewrite.partition import VIEWS, Subgraph
from aotexport_runtime.rewrite.simplify import ASSUMED_SHAPE
from aotexport_runtime.schema.graph import Node
from aotexport_runtime.schema.values import Argument, SequenceMeta, TensorMeta

_UNARY = (
    *("abs", "acos", "asin", "atan", "ceil", "cos", "cosh", "elu", "erf", "exp", "expm1", "floor", "gelu"),
    *("hardsigmoid", "hardswish", "hardtanh", "leaky_relu", "log", "log1p", "log2", "mish", "neg", "reciprocal"),
    *("relu", "round", "rsqrt", "sigmoid", "sign", "silu", "sin", "sinh", "sqrt", "tan", "tanh", "trunc"),
)
_WRITTEN_OVER_FIRST = (
    *(f"{base}.default" for base in (*_UNARY, "clamp", "clamp_max", "clamp_min")),
    *("add.Scalar", "sub.Scalar", "mul.Scalar", "div.Scalar", "sub.Tensor", "div.Tensor"),
    *("masked_fill.Scalar", "masked_fill.Tensor"),
)
_COMMUTATIVE = ("add.Tensor", "mul.Tensor")


IN_PLACE = {f"aten::{name}": f"aten::{name.replace('.', '_.')}" for name in (*_WRITTEN_OVER_FIRST, *_COMMUTATIVE)}
"""Element-wise operators, with the form that writes over its first operand."""

_SWAPPABLE = frozenset(f"aten::{name}" for name in _COMMUTATIVE)

INTO: dict[str, tuple[str, str]] = {
    "aten::where.self": ("aten::where.self_out", "out"),
    **{
        f"aten::{base}_backward.default": (f"aten::{base}_backward.grad_input", "grad_input")
        for base in ("gelu", "sigmoid", "silu", "tanh", "threshold")
    },
}
"""Element-wise operators, with the form that writes into a named argument, which may be any operand."""

_DESTINATIONS: dict[str, str | int] = {
    **dict.fromkeys(IN_PLACE.values(), 0),
    **dict(INTO.values()),
    "python::getitem": 0,
}
"""Operators whose result is in the memory of an argument: its name or position."""

_VIEWS = VIEWS - {"aten::expand.default", "aten::select.int", "aten::slice.Tensor"} | {"aten::reshape.default"}
"""Views that show every element of their operand once."""

FRESH = frozenset(
    (
        *IN_PLACE,
        *INTO,
        *(
            f"aten::{name}"
            for name in (
                *("_log_softmax.default", "_log_softmax_backward_data.default", "_softmax.default"),
                *("_softmax_backward_data.default", "_to_copy.default", "addmm.default", "amax.default"),
                *("amin.default", "baddbmm.default", "bmm.default", "cat.default", "clone.default"),
                *("convolution.default", "convolution_backward.default", "cumsum.default", "embedding.default"),
                *("embedding_dense_backward.default", "eq.Scalar", "eq.Tensor", "full.default", "full_like.default"),
                *("gather.default", "ge.Scalar", "gt.Scalar", "index.Tensor", "index_select.default"),
                *("max_pool2d_with_indices.default", "max_pool2d_with_indices_backward.default", "mean.dim"),
                *("mm.default", "native_batch_norm_backward.default", "native_layer_norm.default"),
                *("native_dropout_backward.default",),
                *("native_layer_norm_backward.default", "pow.Scalar", "pow.Tensor_Scalar", "pow.Tensor_Tensor"),
                *("sum.default", "sum.dim_IntList", "var_mean.correction", "zeros.default", "zeros_like.default"),
                *("_native_batch_norm_legit_functional.default", "_native_batch_norm_legit_no_training.default"),
                *("_scaled_dot_product_flash_attention_for_cpu.default", "rsub.Scalar", "select_backward.default"),
                *("_scaled_dot_product_flash_attention_for_cpu_backward.default", "slice_backward.default"),
            )
        ),
    )
)
"""Operators whose every result has memory of its own."""


def reusing(subgraph: Subgraph, proven: Set[str], *, visible: int) -> Subgraph:
    """Return a subgraph of functional operators with calls that write over dead operands where nothing can see it.

    `proven`: values whose dtype is that of their metadata, others are not written over. The first `visible` outputs,
    which the caller sees, become no views: autograd lets no caller change views that a custom function returns.
    """
    uses = last_uses(subgraph.nodes, subgraph.outputs)
    seen = set(names_in(subgraph.outputs[:visible]))
    memories: dict[str, _Memory] = {}
    metas = {node.name: node.meta for node in subgraph.nodes}
    nodes: list[Node] = []
    for index, node in enumerate(subgraph.nodes):

        def dies(name: str, node: Node = node, index: int = index) -> bool:
            memory = memories.get(name)
            if memory is None or not memory.owned or memory.last_use > index or metas.get(name) != node.meta:
                return False
            if (
                name not in memory.whole
                or (node.name in seen and name in memory.views)
                or not proven >= {name, node.name}
            ):
                return False
            return sum(memories.get(other) is memory for other in operands(node)) == 1

        written = _written_over(node, dies)
        nodes.append(node if written is None else written[0])
        if written is not None:
            memory = memories[written[1]]
            memories[node.name] = memory.joined(node.name, uses, view=written[1] in memory.views)
        else:
            _remember(node, memories, uses)
    return Subgraph(subgraph.inputs, nodes, subgraph.outputs)


def possible_views(subgraph: Subgraph) -> set[str]:
    """Return the outputs of `subgraph` that may be views; it may be a result of `reusing`."""
    new: set[Argument] = set()
    for node in subgraph.nodes:
        place = _DESTINATIONS.get(node.op)
        follows = place is not None and (node.args[place] if isinstance(place, int) else node.kwargs.get(place)) in new
        if follows or _is_new(node):
            new.add(node.name)
    return set(names_in(subgraph.outputs)) - new


@dataclass
class _Memory:
    """An allocation: the values that lie in it.

    Attributes:
        owned: whether this subgraph allocated it, and every value that may lie in it is known.
        last_use: last use of any value that lies in it, as `last_uses` counts; -1: none is used.
        whole: values that cover all of it.
        views: values that are views of another.
    """

    owned: bool
    last_use: int = -1
    whole: set[str] = field(default_factory=set[str])
    views: set[str] = field(default_factory=set[str])

    def joined(self, name: str, uses: dict[str, int], *, whole: bool = True, view: bool = False) -> _Memory:
        self.last_use = max(self.last_use, uses.get(name, -1))
        if whole:
            self.whole.add(name)
        if view:
            self.views.add(name)
        return self


def _remember(node: Node, memories: dict[str, _Memory], uses: dict[str, int]) -> None:
    taken = operands(node)
    if node.op == ASSUMED_SHAPE:
        return
    if node.op == "python::getitem":
        # Each item has memory of its own, keyed by its index, and lives as long as the sequence.
        whole = memories.get(taken[0]) if len(taken) == 1 else None
        item = _Memory(owned=False)
        if whole is not None and whole.owned:
            made = _Memory(owned=True, last_use=uses[taken[0]])
            item = memories.setdefault(f"{taken[0]}[{node.args[1]!r}]", made).joined(node.name, uses)
        memories[node.name] = item
    elif _is_new(node):
        is_tensor = not isinstance(node.meta, SequenceMeta)
        memories[node.name] = _Memory(owned=True).joined(node.name, uses, whole=is_tensor)
    elif node.op in _VIEWS and taken and taken[0] in memories:
        memories[node.name] = memories[taken[0]].joined(node.name, uses, view=True)
    else:
        # It may lie in the memory of any operand, or show a part of it.
        for name in taken:
            if name in memories:
                memories[name].owned = False
        memories[node.name] = _Memory(owned=False)


def _is_new(node: Node) -> bool:
    """Return whether the results of `node` have memory of their own."""
    if node.op == "aten::linear.default":
        return isinstance(node.meta, TensorMeta) and len(node.meta.shape) == 2  # A matmul and a sum.
    if node.op == "aten::native_dropout.default":
        return node.args[2] is True and node.args[1] not in (0, 1)  # Others return their operand.
    return node.op in FRESH or node.op == LAYER


def _written_over(node: Node, dies: Callable[[str], bool]) -> tuple[Node, str] | None:
    """Return the call that writes over an operand, and that operand."""
    swaps, (into, keyword) = node.op in _SWAPPABLE, INTO.get(node.op, ("", ""))
    if not isinstance(node.meta, TensorMeta) or (swaps and node.kwargs) or not (into or node.op in IN_PLACE):
        return None
    for place, operand in enumerate(node.args if into else node.args[: 1 + swaps]):
        if isinstance(operand, str) and dies(operand):
            if into:
                return msgspec.structs.replace(node, op=into, kwargs={**node.kwargs, keyword: operand}), operand
            args = [operand, *(argument for i, argument in enumerate(node.args) if i != place)]
            return msgspec.structs.replace(node, op=IN_PLACE[node.op], args=args), operand
    return None
