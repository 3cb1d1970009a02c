"""Models of a line or two."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn


def module(forward: Callable[..., Any] | None = None, **members: Any) -> nn.Module:
    """Return a module with this forward, if any; tensors among its members that are no parameters are buffers."""
    made = type("Model", (nn.Module,), {"forward": forward} if forward else {})()
    for name, member in members.items():
        is_buffer = isinstance(member, torch.Tensor) and not isinstance(member, nn.Parameter)
        made.register_buffer(name, member) if is_buffer else setattr(made, name, member)
    return made
