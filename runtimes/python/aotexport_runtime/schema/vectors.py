"""Recorded calls of eager execution: the bundle's self-test."""

from __future__ import annotations

from typing import Annotated

from aotexport_runtime.schema import bounded
from aotexport_runtime.schema.bounded import Record
from aotexport_runtime.schema.graph import Subclass

MAX_CALLS = 100


class VectorPart(Record, kw_only=True):
    """A plain tensor that an argument of a wrapper subclass is made of; strides and offset are in elements.

    Attributes:
        key: name of the stored flat span of storage that it is made from; two of one key share memory.
        offset: where it begins in the stored span.
        is_complex: whether the stored tensor is `view_as_real` of a complex one.
    """

    key: str
    shape: bounded.Axes
    stride: bounded.Axes
    offset: bounded.Offset = 0
    is_complex: bool = False


class VectorInput(VectorPart, kw_only=True):
    """An argument of a recorded call; of an integer, and of a tensor subclass, `key` is empty.

    Attributes:
        requires_grad: whether autograd records it.
        is_leaf: False: made by an operator from a leaf, whose gradient is recorded.
        value: of a dynamic integer.
        parts: the plain tensors that a tensor subclass is made of.
        quantiles: of a tensor of floats whose span is generated (11.11): values at equal steps of probability, the
            least first; else empty.
    """

    path: bounded.Line
    key: str = ""
    shape: bounded.Axes = ()
    stride: bounded.Axes = ()
    requires_grad: bool = False
    is_leaf: bool = True
    value: int | None = None
    subclass: Subclass | None = None
    parts: tuple[VectorPart, ...] = ()
    quantiles: Annotated[
        tuple[float, ...], bounded.Bounds(maxItems=bounded.MAX_QUANTILES, code="vector-malformed", apart=True)
    ] = ()


def spans(spec: VectorInput) -> tuple[VectorPart, ...]:
    """Return the stored spans of an argument: the argument, the parts of a tensor subclass, or none."""
    if spec.value is not None:
        return ()
    return (spec,) if spec.subclass is None else spec.parts


class Vector(Record, kw_only=True):
    """Consecutive calls of one program with the same arguments, and their observed effects.

    Attributes:
        seed: passed to `torch.manual_seed` before the first call.
        dropped_gradients: names of state tensors whose gradient, which is large, is dropped once it was observed.
        inputs: one per tensor and integer argument, in the order of `Program.inputs`.
        facts: observations beside values: metadata, identity, aliasing, which gradients are None.
        values: names of the observed tensors; the tensor of `values[i]` is stored under the key `v<i>`.
        sample: most elements of an observed tensor that are stored; None: see 11.8.
        eager_errors: by name of a value of float32, or of its norm, that may be beyond the tolerance: how far eager is
            from its results in float64, relative as comparisons are.
    """

    program: Annotated[bounded.OwnName, bounded.Code("vector-malformed")]
    seed: bounded.Count
    calls: Annotated[bounded.Count, bounded.AtMost(MAX_CALLS)]
    backward: bool
    dropped_gradients: tuple[str, ...] = ()
    inputs: tuple[VectorInput, ...]
    facts: dict[str, str]
    values: Annotated[tuple[str, ...], bounded.Unique()]
    sample: Annotated[bounded.Positive, bounded.Code("vector-malformed")] | None = None
    eager_errors: dict[Annotated[str, bounded.NameOf("Vector.values", "vector-malformed")], bounded.NonNegative] = {}
