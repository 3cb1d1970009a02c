"""Models of libraries as data: what to call, by path, with which arguments; and calls of them, with dynamic axes."""

import pkgutil
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.export import Dim

BATCH = Dim("batch", min=2, max=16)


@dataclass(frozen=True)
class Made:
    """A call to come of a library's function: its path, and arguments that may be such calls themselves."""

    path: str
    args: tuple[Any, ...]
    options: dict[str, Any]

    def make(self) -> Any:
        """Import the library and make the call."""
        options = {name: _value(option) for name, option in self.options.items()}
        return pkgutil.resolve_name(self.path)(*map(_value, self.args), **options)


@dataclass(frozen=True)
class Call:
    """Arguments of a model, by name, with the dynamic axes of each.

    Attributes:
        kwargs: the arguments.
        shapes: their dynamic axes.
        options: further arguments of `aotexport.export`.
    """

    kwargs: dict[str, Any]
    shapes: dict[str, Any]
    options: dict[str, Any] = field(default_factory=dict)


Model = tuple[Made, Callable[[], Call]]


def made(path: str, /, *args: Any, **options: Any) -> Made:
    """Return a call to come."""
    return Made(path, args, options)


def the(path: str) -> Made:
    """Return what has this path in a library."""
    return made("pkgutil.resolve_name", path)


def sizes(option: Any) -> Any:
    """Return an option as Python has it that JSON holds as a list."""
    return tuple(option) if isinstance(option, list) else option


def rows(**kwargs: Any) -> Call:
    """Return a call whose tensors have the batch as first axis."""
    return Call(
        kwargs, {name: {0: BATCH} if isinstance(value, torch.Tensor) else None for name, value in kwargs.items()}
    )


def images(name: str = "x", side: int = 64) -> Call:
    """Return a call with pictures alone."""
    return rows(**{name: torch.randn(3, 3, side, side)})


def _value(value: Any) -> Any:
    if isinstance(value, list):
        return [_value(one) for one in value]
    return value.make() if isinstance(value, Made) else value
