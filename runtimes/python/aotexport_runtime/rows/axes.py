"""The axes along which calls could be joined, as far as sizes tell."""

from __future__ import annotations

from dataclasses import dataclass

from aotexport_runtime.schema.program import ArgumentInput, Program, SizeInput
from aotexport_runtime.schema.sizes import Dimension
from aotexport_runtime.schema.trees import Leaf
from aotexport_runtime.schema.values import TensorMeta
from aotexport_runtime.values.sizes import symbols_of
from aotexport_runtime.values.trees import leaves


@dataclass(frozen=True, kw_only=True)
class RowAxes:
    """A dynamic size that stands once in every tensor of a call, and is read nowhere else.

    Attributes:
        dimension: the size.
        inputs: axis per `ArgumentInput`, by its index in `Program.inputs`.
        outputs: axis per leaf of the result, by its index in `Program.outputs`.
    """

    dimension: Dimension
    inputs: dict[int, int]
    outputs: dict[int, int]


def row_axes(program: Program) -> list[RowAxes]:
    """Return the sizes along which calls of a program could be joined, the likeliest first."""
    returned = [leaf.index for _, leaf in leaves(program.output_tree) if isinstance(leaf, Leaf)]
    given = {index: spec.meta for index, spec in enumerate(program.inputs) if isinstance(spec, ArgumentInput)}
    made = {index: program.outputs[index] for index in returned}
    if not given or not made or any(isinstance(spec, SizeInput) for spec in program.inputs):
        return []
    found: list[RowAxes] = []
    for dimension in program.dimensions:
        inputs, outputs = (
            {index: axis for index, meta in metas.items() if (axis := _only_axis(meta, dimension.symbol)) is not None}
            for metas in (given, made)
        )
        is_free = (dimension.factor, dimension.offset) == (1, 0) and not any(
            dimension.symbol in symbols_of(guard) for guard in program.guards
        )
        if is_free and (inputs.keys(), outputs.keys()) == (given.keys(), made.keys()):
            found.append(RowAxes(dimension=dimension, inputs=inputs, outputs=outputs))
    return sorted(found, key=lambda axes: ("batch" not in axes.dimension.name.lower(), sum(axes.inputs.values())))


def _only_axis(meta: TensorMeta | None, symbol: str) -> int | None:
    """Return the one axis whose size is `symbol`; None: there is none, or another size depends on it."""
    shape = () if meta is None else meta.shape
    dependent = [axis for axis, size in enumerate(shape) if symbol in symbols_of(size)]
    return dependent[0] if len(dependent) == 1 and shape[dependent[0]] == symbol else None
