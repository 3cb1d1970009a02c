"""Versions of tensors that eager saves and a joint graph need not: backward raises where one was changed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


def node_of(returned: Sequence[Any]) -> Any:
    """Return the node of autograd that a joint graph's forward made, given what it returned; None: it made none."""
    nodes = (value.grad_fn for value in returned if isinstance(value, torch.Tensor))
    return next((node for node in nodes if node is not None), None)


def remember_versions(node: Any, checked: Sequence[torch.Tensor]) -> None:
    """Let a backward pass through `node`, a joint graph's, raise where one of `checked` is changed from now on."""
    node.versions = [(tensor, tensor._version) for tensor in checked if not tensor.is_inference()]


def check_versions(ctx: Any) -> None:
    """Raise where a tensor that eager saves, and the graph need not, was changed since the call."""
    for tensor, version in getattr(ctx, "versions", ()):
        if tensor._version != version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: an "
                f"input of the program, of shape {list(tensor.shape)}, is at version {tensor._version}; expected "
                f"version {version} instead"
            )
