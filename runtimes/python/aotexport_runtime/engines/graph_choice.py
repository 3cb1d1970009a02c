"""Which graph of a program runs under target `auto`, where both are right: read off the records. No torch."""

from __future__ import annotations

import math
from collections.abc import Iterable

from aotexport_runtime.bundle.read import Bundle
from aotexport_runtime.schema.graph import Graph
from aotexport_runtime.schema.program import Program
from aotexport_runtime.schema.values import SequenceMeta, TensorMeta, ValueMeta

FEW_OPERATORS = 64
"""Operators of a joint graph up to which autograd's nodes in C++, one per operator, cost less than one in Python."""

SMALL_ELEMENTS = 1 << 14
"""Elements of a tensor up to which calls of operators cost more than what they compute; no product of such matrices is
worth a choice between libraries."""

DYNAMIC_SIZE = 64
"""What a size that only calls know counts as."""


def why_forward(bundle: Bundle, program: Program) -> str | None:
    """Return why the forward graph of `program` is the faster one; None: the functional graph is.

    Lowered forms of the functional graph are not looked at.
    """
    if program.functional is None or not program.forward.differentiable:
        return None
    forward = bundle.graph(program.name, program.forward.file)
    functional = bundle.graph(program.name, program.functional.file)
    whole, apart = len(forward.nodes), len(functional.nodes)
    if apart > 10 * whole + 50:
        return f"the other graph takes its {whole} operators apart, into {apart}"
    if program.functional.gradients is not None and _is_small(functional):
        return f"the other graph has few operators, {apart}, on small tensors"
    return None


def _is_small(graph: Graph) -> bool:
    """Return whether calls of operators take most of a step of a joint graph."""
    if len(graph.nodes) > FEW_OPERATORS or graph.subgraphs:
        return False
    metas = (value.meta for value in (*graph.inputs, *graph.nodes))
    return all(_elements(meta) <= SMALL_ELEMENTS for meta in _tensors(metas))


def _tensors(metas: Iterable[ValueMeta]) -> Iterable[TensorMeta]:
    for meta in metas:
        if isinstance(meta, TensorMeta):
            yield meta
        elif isinstance(meta, SequenceMeta):
            yield from _tensors(meta.items)


def _elements(meta: TensorMeta) -> int:
    return math.prod(size if isinstance(size, int) else DYNAMIC_SIZE for size in meta.shape)
