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


def seeded(make: Callable[[], nn.Module]) -> nn.Module:
    """Return what a class or function makes, with the same random weights each time."""
    torch.manual_seed(0)
    return make()


class Tiny(nn.Module):
    """A little of everything: parameters, a mutated buffer, a default, a view of an input, several results."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor, scale: float = 2.0) -> Any:
        self.calls.add_(1)
        best = self.linear(x).mul(scale).max(dim=1)
        return {"best": best.values, "where": best.indices, "turned": x.t()}
