"""What the backward of a joint graph checks: versions of tensors that eager reads, and hooks on inner outputs.

A joint graph reads other tensors than eager. It is one node of autograd, so gradients of other outputs do not pass
through an inner output, which they are computed from: its hooks and `retain_grad` would see a part of its gradient.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from aotexport_runtime.engines.functional.tangents import positions_of_tangents
from aotexport_runtime.errors import NotSupported
from aotexport_runtime.guards.caller import has_hooks
from aotexport_runtime.rewrite.names import operands
from aotexport_runtime.schema.graph import Graph
from aotexport_runtime.schema.program import FunctionalGraph, InputItself, Program
from aotexport_runtime.schema.trees import Leaf
from aotexport_runtime.schema.values import Argument
from aotexport_runtime.validate.arguments import references
from aotexport_runtime.values.trees import leaves


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


def watch(node: Any, inner: Sequence[InnerOutput], outputs: Sequence[Any]) -> None:
    """Let the backward of a joint graph's `node` find the hooks on its inner outputs."""
    node.watched = [(each, weakref.ref(outputs[each.output])) for each in inner]


def refuse_unseen_gradients(node: Any, gradients: Sequence[torch.Tensor | None]) -> None:
    """Refuse a backward in which a hook or `retain_grad` would see less than the whole gradient.

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


def node_of(returned: Sequence[Any]) -> Any:
    """Return the autograd node of a joint graph's forward, given its results; None: it made none."""
    nodes = (value.grad_fn for value in returned if isinstance(value, torch.Tensor))
    return next((node for node in nodes if node is not None), None)


def remember_versions(node: Any, inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
    """Let backward through a joint graph's `node` raise if a tensor that eager reads is changed from now on."""
    versions: list[tuple[torch.Tensor, int, Sequence[int]]] = []
    for is_input, index, positions in node.call[0].checks:
        # An output would keep its own graph alive.
        tensor = inputs[index] if is_input else outputs[index].detach()
        if not tensor.is_inference():
            versions.append((tensor, tensor._version, positions))
    node.versions = versions


def check_versions(ctx: Any, grads: Sequence[torch.Tensor | None]) -> None:
    """Raise if a tensor that eager reads for one of `grads` was changed since the call."""
    for tensor, version, positions in getattr(ctx, "versions", ()):
        if tensor._version != version and any(grads[position] is not None for position in positions):
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: an "
                f"input or output of the program, of shape {list(tensor.shape)}, is at version {tensor._version}; "
                f"expected version {version} instead"
            )
