"""Casts of parameters that autocast makes once for several operators of a region.

Eager keeps the cast of a parameter until the outermost region ends, and sums the gradients of its uses in the lower
precision. In the trace of a joint graph parameters are no leaves, and each use would have its own cast.
Source: torch 2.13, aten/src/ATen/autocast_mode.cpp, `cached_cast`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx.node import map_arg
from torch.utils._python_dispatch import TorchDispatchMode

from aotexport.capture.trace.forward_capture import ForwardCapture
from aotexport.torch_internals.names import ENTER_AUTOCAST, EXIT_AUTOCAST, OpOverload


@dataclass(frozen=True)
class Cast:
    """A cast that eager makes once.

    Attributes:
        weight: placeholder of a parameter.
        region: the outermost region, by the node that enters it.
        device_type: type of the region's devices.
        dtype: the dtype to cast to.
    """

    weight: torch.fx.Node
    region: torch.fx.Node
    device_type: str
    dtype: torch.dtype


def shared_casts(forward: ForwardCapture) -> dict[torch.fx.Node, list[Cast]]:
    """Return, per node of the forward graph, the casts that it shares with others."""
    placeholders = forward.graph.graph.find_nodes(op="placeholder")
    weights = {
        node
        for node, binding, fake in zip(placeholders, forward.bindings, forward.inputs, strict=True)
        if binding.entry is not None and fake.requires_grad and fake.is_leaf and fake.dtype is torch.float32
    }
    regions: list[torch.fx.Node] = []
    uses: dict[Cast, list[torch.fx.Node]] = defaultdict(list)
    for node in forward.graph.graph.nodes:
        if node.target is ENTER_AUTOCAST:
            regions.append(node)
        elif node.target is EXIT_AUTOCAST:
            regions.remove(node.args[0])
        elif regions and isinstance(node.target, OpOverload) and not node.target._schema.is_mutable:
            arguments: Any = regions[-1].args
            device_type, dtype, enabled, is_cached = arguments
            if enabled and is_cached:
                dtype = dtype or torch.get_autocast_dtype(device_type)
                for weight in weights.intersection(node.all_input_nodes):
                    uses[Cast(weight, regions[0], device_type, dtype)].append(node)
    found: dict[torch.fx.Node, list[Cast]] = defaultdict(list)
    for cast, nodes in uses.items():
        for node in nodes:
            if len(nodes) > 1 and _is_cast(node, cast):
                found[node].append(cast)
    return found


class _Casts(TorchDispatchMode):
    """Record whether a tensor is cast."""

    def __init__(self, tensor: torch.Tensor) -> None:
        super().__init__()
        self._tensor = tensor
        self.found = False

    def __torch_dispatch__(
        self, func: Any, types: Sequence[Any], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        self.found = self.found or (func is torch.ops.aten._to_copy.default and args[0] is self._tensor)
        return func(*args, **(kwargs or {}))


def _is_cast(node: torch.fx.Node, cast: Cast) -> bool:
    """Return whether the operator casts the weight; it runs on fake tensors to find out."""
    args, kwargs = map_arg((node.args, dict(node.kwargs)), lambda taken: taken.meta["val"])
    region = torch.autocast(cast.device_type, dtype=cast.dtype, cache_enabled=False)
    with torch.no_grad(), region, _Casts(cast.weight.meta["val"]) as seen:
        node.target(*args, **kwargs)  # type: ignore[operator]
    return seen.found
