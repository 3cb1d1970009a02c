"""What preconditions are made of: sizes and values that a call must have."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from aotexport_runtime.errors import CheckFailed
from aotexport_runtime.execution import transforms

Arguments = Mapping[str, Any]
"""The arguments of a call by the names of the operator's schema, defaults included; and `OPERATOR`."""

Check = Callable[[Arguments], None]

OPERATOR = "operator name"
"""Key of the operator's name, `base.overload`."""

PRECONDITIONS: dict[str, Check] = {}
"""What to check before an operator runs, by its base name for all overloads, or by its full name."""

WRITTEN: dict[str, Callable[[Arguments, Any], None]] = {}
"""What to write into the results of an operator that its kernel leaves as it was, by its base name."""


def before(*operators: str) -> Callable[[Check], Check]:
    """Return a decorator that makes a function the check of operators: a row of `PRECONDITIONS` each."""

    def register(check: Check) -> Check:
        PRECONDITIONS.update(dict.fromkeys(operators, check))
        return check

    return register


def after(*operators: str) -> Callable[[Callable[[Arguments, Any], None]], None]:
    """Return a decorator that makes a function complete the results of operators: a row of `WRITTEN` each."""
    return lambda complete: WRITTEN.update(dict.fromkeys(operators, complete))


def needs(condition: Callable[[Arguments], Any], message: str) -> Check:
    """Return the check of one condition."""
    return lambda a: require(condition(a), message)


def require(condition: Any, message: str) -> None:
    """Raise `CheckFailed` unless a condition holds; on other devices than the CPU, the device checks it."""
    if isinstance(condition, torch.Tensor) and condition.device.type != "cpu":
        torch.ops.aten._assert_async.msg(condition, message)
    elif not condition:
        raise CheckFailed(message)


def is_recorded(a: Arguments) -> bool:
    """Return whether autograd records a call, and will run kernels of its own on what the call has taken and given.

    A batch of `torch.func.vmap` does not tell whether what it is of requires grad.
    """
    tensors = (tensor for value in a.values() for tensor in (value if isinstance(value, list | tuple) else [value]))
    return torch.is_grad_enabled() and (
        transforms.active() or any(isinstance(tensor, torch.Tensor) and tensor.requires_grad for tensor in tensors)
    )


def within(values: torch.Tensor, low: int, high: Any, what: str) -> None:
    """Require integers from `low` to below `high`."""
    require(not (values.is_floating_point() or values.is_complex()), f"{what} must be integers")
    if values.numel():
        least, most = torch.aminmax(values)
        require((least >= low) & (most < high), f"{what} must be from {low} to below {high}")


def sized(tensor: torch.Tensor | None, expected: Sequence[Any], what: str) -> None:
    """Require a tensor, if there is one, to have these sizes."""
    if tensor is not None and tensor.shape != tuple(expected):
        raise CheckFailed(f"{what} must have the sizes {tuple(expected)}, not {tuple(tensor.shape)}")


def sizes(a: Arguments, expected: Sequence[Any], *names: str) -> None:
    """Require arguments that are given to have these sizes."""
    for name in names:
        sized(a.get(name), expected, f"`{name}`")


def spacious(a: Arguments, *names: str) -> None:
    """Require given tensors to have memory for their elements, one after the other: kernels walk so."""
    for name in names:
        tensor = a.get(name)
        if tensor is not None and not tensor.is_contiguous():
            place, count = tensor.storage_offset(), tensor.untyped_storage().nbytes() // tensor.element_size()
            require(place + tensor.numel() <= count, f"elements of `{name}` must not share memory")


def contiguous(a: Arguments, *names: str) -> None:
    """Require given tensors to be contiguous."""
    for name in names:
        require(a.get(name) is None or a[name].is_contiguous(), f"`{name}` must be contiguous")


def integers(values: Any) -> torch.Tensor:
    """Return a list of integers, or a tensor of them, as a tensor."""
    return values if isinstance(values, torch.Tensor) else torch.tensor(list(values), dtype=torch.int64)
