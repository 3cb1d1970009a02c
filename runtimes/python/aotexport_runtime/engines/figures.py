"""Which engine is the faster one for a program, by its records and recorded figures. No torch.

The figures are those of docs/decisions/0018.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from aotexport_runtime.execution.matmul.sizes import Matmul, is_worth_choosing, matmuls_of
from aotexport_runtime.rewrite.reuse import IN_PLACE
from aotexport_runtime.schema.graph import Graph
from aotexport_runtime.schema.sizes import Size
from aotexport_runtime.schema.values import SequenceMeta, TensorMeta, ValueMeta

LIBRARY_LOSES_UP_TO_OPERATORS = 3
"""Most operators of a forward graph on small tensors that run faster by calls than by entering a library."""

LIBRARY_LOSES_UP_TO_ELEMENTS = 1 << 14
"""Most elements of a tensor for which calling an operator costs more than its arithmetic."""

FUSED_PER_MATMUL = 1.5
"""Least operators to fuse, per matmul, for which libraries win by fusing alone: BERT has 0.9 of them, and loses; GPT-2
has 2.6, ResNet 2.1."""

CHAIN_GAINS_FROM_OPERATORS = 64
"""Most operators of a functional graph that does not make up for its fixed cost."""

ELEMENT_WISE_PART = 0.75
"""Least part of element-wise operators in a chain of them; chains train in 0.69 of eager's time, and by the forward
graph in 1.08."""

MEASURED_WORK = 1 << 30
"""Most multiplications of a matmul that is measured in a few milliseconds."""

DYNAMIC_SIZE = 64
"""Value that stands for a dynamic size in estimates."""

_ELEMENT_WISE = frozenset((*IN_PLACE, *IN_PLACE.values(), "aten::pow.Tensor_Scalar"))
_FUSED_NORMS = frozenset(("aten::batch_norm.default", "aten::layer_norm.default"))
_CONTRACTIONS = (
    *("linear", "mm", "addmm", "bmm", "baddbmm", "matmul", "scaled_dot_product_attention"),
    *("convolution", "conv1d", "conv2d", "conv3d"),
)


def is_taken_apart(forward: Graph, functional: Graph) -> bool:
    """Return whether the functional graph unrolls operators step by step, as of recurrent layers."""
    return len(functional.nodes) > 10 * len(forward.nodes) + 50


def largest_matmul(functional: Graph) -> Matmul | None:
    """Return the largest matmul worth a choice among those quick to measure, else the first; None: there is none."""
    metas: dict[str, ValueMeta] = {value.name: value.meta for value in (*functional.inputs, *functional.nodes)}
    matmuls = [each for each in matmuls_of(functional.nodes, metas) if is_worth_choosing("fastest", *sizes_of(each))]
    soon = [each for each in matmuls if math.prod(sizes_of(each)) <= MEASURED_WORK]
    return max(soon or matmuls[:1], key=lambda each: math.prod(sizes_of(each)), default=None)


def sizes_of(matmul: Matmul) -> tuple[int, int, int]:
    """Return rows, depth and columns; `DYNAMIC_SIZE` for dynamic sizes."""
    return _size(matmul.rows), _size(matmul.depth), _size(matmul.columns)


def is_element_wise(forward: Graph, functional: Graph) -> bool:
    """Return whether a program is a long chain of element-wise operators, which autograd nodes between would slow."""
    element_wise = sum(node.op in _ELEMENT_WISE for node in forward.nodes)
    return len(functional.nodes) > CHAIN_GAINS_FROM_OPERATORS and element_wise >= ELEMENT_WISE_PART * len(forward.nodes)


def libraries_win(forward: Graph, functional: Graph) -> bool:
    """Return whether fusion alone makes libraries faster than both graphs, by any matmul backend."""
    if is_element_wise(forward, functional):
        return True
    if _is_small(forward):
        return len(forward.nodes) > LIBRARY_LOSES_UP_TO_OPERATORS
    operators = [node.op for node in forward.nodes]
    fused = sum(op in _ELEMENT_WISE or op in _FUSED_NORMS for op in operators)
    matmuls = sum(op.removeprefix("aten::").partition(".")[0] in _CONTRACTIONS for op in operators)
    return fused >= FUSED_PER_MATMUL * matmuls


def _is_small(graph: Graph) -> bool:
    """Return whether calling operators takes most of a step, since all tensors are small."""
    metas = (value.meta for value in (*graph.inputs, *graph.nodes))
    return not graph.subgraphs and all(_elements(meta) <= LIBRARY_LOSES_UP_TO_ELEMENTS for meta in _tensors(metas))


def _tensors(metas: Iterable[ValueMeta]) -> Iterable[TensorMeta]:
    for meta in metas:
        if isinstance(meta, TensorMeta):
            yield meta
        elif isinstance(meta, SequenceMeta):
            yield from _tensors(meta.items)


def _elements(meta: TensorMeta) -> int:
    return math.prod(map(_size, meta.shape))


def _size(size: Size) -> int:
    return size if isinstance(size, int) else DYNAMIC_SIZE
