"""Tangents, the gradients of outputs: their layouts, and which outputs get them, or a part of them, or none."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from aotexport_runtime.rewrite.names import operands
from aotexport_runtime.schema.graph import Graph
from aotexport_runtime.schema.program import FreshOutput, FunctionalGraph, InputItself, Program, Tangent
from aotexport_runtime.schema.trees import Leaf
from aotexport_runtime.schema.values import Argument
from aotexport_runtime.validate.arguments import references
from aotexport_runtime.values import dtypes, sizes
from aotexport_runtime.values.trees import leaves

LayOut = Callable[[torch.Tensor, dict[str, int]], torch.Tensor]
"""Returns a tangent in the layout of the capture, for these values of symbols."""


def layout(spec: Tangent) -> LayOut:
    """Return a function that converts a tangent to the layout and dtype that the joint graph was traced with."""
    dtype, memory_format = dtypes.dtype(spec.meta.dtype), spec.memory_format
    if memory_format is not None:
        format_ = getattr(torch, memory_format)
        contiguous = format_ is torch.contiguous_format

        def formatted(tangent: torch.Tensor, symbols: dict[str, int]) -> torch.Tensor:
            if tangent.dtype is not dtype:
                tangent = tangent.to(dtype)
            # Asking is much cheaper than a conversion that does nothing.
            return tangent if contiguous and tangent.is_contiguous() else tangent.contiguous(memory_format=format_)

        return formatted
    assert spec.stride is not None
    steps = spec.stride

    def strided(tangent: torch.Tensor, symbols: dict[str, int]) -> torch.Tensor:
        tangent = tangent if tangent.dtype is dtype else tangent.to(dtype)
        stride = tuple([sizes.evaluate(step, symbols) for step in steps])
        if tangent.stride() == stride:
            return tangent
        # Exports no longer write such layouts; existing bundles may have them.
        if _overlaps(tangent.shape, stride):
            return tangent.contiguous()
        laid_out = torch.empty_strided(tangent.shape, stride, dtype=dtype, device=tangent.device)
        return laid_out.copy_(tangent)

    return strided


def _overlaps(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Return whether elements of such a layout may share memory, as those of `unfold` do."""
    reach = 0
    for step, size in sorted(zip(stride, shape, strict=True)):
        if size > 1:
            if step <= reach:
                return True
            reach += (size - 1) * step
    return False


def zeros(spec: Tangent, shape: Sequence[int], device: torch.device, symbols: dict[str, int]) -> torch.Tensor:
    """Return zeros of a shape for an undefined tangent."""
    return layout(spec)(torch.zeros(shape, dtype=dtypes.dtype(spec.meta.dtype), device=device), symbols)


def positions_of_tangents(functional: FunctionalGraph) -> list[int]:
    """Return per tangent the position of its result among those of the joint graph's forward."""
    assert functional.gradients is not None
    mutations, outputs = len(functional.mutations), len(functional.outputs)
    start = {"mutation": 0, "output": mutations, "intermediate_base": mutations + outputs}
    return [start[tangent.of] + tangent.index for tangent in functional.gradients.tangents]


def flowless_outputs(functional: FunctionalGraph) -> set[int]:
    """Return the outputs that require grad though no gradient flows through them: views made under `torch.no_grad`."""
    if functional.gradients is None:
        return set()
    reached = {tangent.index for tangent in functional.gradients.tangents if tangent.of == "output"}
    required = {i for i, o in enumerate(functional.outputs) if isinstance(o, FreshOutput) and o.requires_grad}
    return required - reached


class InnerOutput(NamedTuple):
    """An output, `name` in the call's result, that others are computed from.

    `outer`: positions of these among the results of the joint graph's forward.
    """

    output: int
    name: str
    outer: tuple[int, ...]


def inner_outputs(graph: Graph, functional: FunctionalGraph, program: Program) -> list[InnerOutput]:
    """Return the outputs of a joint graph that require grad and that others are computed from."""
    mutations, outputs, tangents = len(functional.mutations), len(functional.outputs), positions_of_tangents(functional)
    own: dict[str, int] = {}
    for index, spec in enumerate(functional.outputs):
        if not isinstance(spec, InputItself) and spec.requires_grad:
            for name in references(graph.outputs[mutations + index]):
                own[name] = own.get(name, 0) | 1 << index
    # Per value, a bit for each output that it is computed from.
    sources: dict[str, int] = {}
    for node in graph.nodes:
        sources[node.name] = _union(operands(node), sources) | own.get(node.name, 0)
    behind = {p: _union([graph.outputs[p]], sources) & ~_union([graph.outputs[p]], own) for p in tangents}
    names = {leaf.index: f"output{path}" for path, leaf in leaves(program.output_tree) if isinstance(leaf, Leaf)}
    found = [
        InnerOutput(index, names.get(index, "output"), tuple([p for p in tangents if behind[p] >> index & 1]))
        for index in range(outputs)
    ]
    return [inner for inner in found if inner.outer]


def _union(arguments: Sequence[Argument], bits: dict[str, int]) -> int:
    found = 0
    for argument in arguments:
        for name in references(argument):
            found |= bits.get(name, 0)
    return found
