"""What a caller can see of a call beside what recorded calls note: hooks, versions, the grad mode that it leaves.

Each function makes a call of eager or of the reader, and returns what it saw.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

Call = Callable[[list[Any]], list[Any]]
"""Takes the arguments of a program; returns its outputs."""


def gradients_of_returned_views(call: Call, arguments: list[Any]) -> list[bool]:
    """Return which outputs get a gradient if the loss depends on the second and the fourth alone."""
    outputs = call(arguments)
    for output in outputs:
        output.retain_grad()
    (outputs[1].sum() + outputs[3].sum()).backward()
    return [output.grad is not None for output in outputs]


def visits_of_producers(call: Call, arguments: list[Any]) -> int:
    """Return how often backward visits what made the arguments that are no leaves."""
    visits: list[None] = []
    for argument in arguments:
        if argument.grad_fn is not None:
            argument.grad_fn.register_hook(lambda *gradients: visits.append(None))
    call(arguments)[0].sum().backward()
    return len(visits)


def mode_that_is_left(call: Call, arguments: list[Any]) -> bool:
    """Return the grad mode after the call."""
    call(arguments)
    return torch.is_grad_enabled()


def rises_of_versions(call: Call, arguments: list[Any]) -> list[int]:
    """Return by how much the versions of the arguments rise."""
    before = [argument._version for argument in arguments]
    call(arguments)
    return [argument._version - version for argument, version in zip(arguments, before, strict=True)]


def backward_after_a_change(call: Call, arguments: list[Any]) -> str:
    """Return whether backward raises after the caller has changed the first output in place."""
    outputs = call(arguments)
    with torch.no_grad():
        outputs[0].mul_(2)
    try:
        sum(output.sum() for output in outputs).backward()
    except RuntimeError:
        return "raises"
    return "runs"
