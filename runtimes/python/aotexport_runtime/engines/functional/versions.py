"""Version checks of tensors that eager reads in backward, and a joint graph does not, or in more passes than eager."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


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
