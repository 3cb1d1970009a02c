"""Inner outputs: outputs that other outputs are computed from.

A joint graph is one node of autograd, so gradients of the other outputs do not pass through an inner output: a hook or
`retain_grad` on it would see only a part of its gradient. Backward refuses that.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from aotexport_runtime.errors import NotSupported
from aotexport_runtime.guards.caller import has_hooks
from aotexport_runtime.rewrite.names import operands
from aotexport_runtime.schema.graph import Graph
from aotexport_runtime.schema.program import FunctionalGraph, InputItself, Program
from aotexport_runtime.schema.trees import Leaf
from aotexport_runtime.schema.values import Argument
from aotexport_runtime.validate import references
from aotexport_runtime.values.trees import leaves


class InnerOutput(NamedTuple):
    """An output that others are computed from.

    Attributes:
        output: index of the output of the program.
        name: its path in the call's result.
        outer: positions of the other outputs among the results of the joint graph's forward.
    """

    output: int
    name: str
    outer: tuple[int, ...]


def inner_outputs(graph: Graph, functional: FunctionalGraph, program: Program) -> list[InnerOutput]:
    """Return the outputs of a joint graph that require grad and that others are computed from."""
    assert functional.gradients is not None
    mutations, outputs = len(functional.mutations), len(functional.outputs)
    start = {"mutation": 0, "output": mutations, "intermediate_base": mutations + outputs}
    tangents = [start[tangent.of] + tangent.index for tangent in functional.gradients.tangents]
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


def watch(node: Any, inner: Sequence[InnerOutput], outputs: Sequence[Any]) -> None:
    """Let the backward of a joint graph's `node` find the hooks on its inner outputs."""
    node.watched = [(each, weakref.ref(outputs[each.output])) for each in inner]


def refuse_unseen_gradients(node: Any, gradients: Sequence[torch.Tensor | None]) -> None:
    """Refuse a backward in which a hook or `retain_grad` would see less than the whole gradient.

    Args:
        node: the node that `watch` was called with.
        gradients: gradient per result of the forward.

    Raises:
        NotSupported: names the output.
    """
    for inner, reference in getattr(node, "watched", ()):
        output = reference()
        if output is None or not has_hooks(output):
            continue
        if any(gradients[position] is not None for position in inner.outer):
            raise NotSupported(
                f"`{inner.name}` has a hook or retains its gradient, and another output is computed from it within the "
                "joint graph, where the gradient does not come by the hook. Load the bundle with target='autograd'"
            )
