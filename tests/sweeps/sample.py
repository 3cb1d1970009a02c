"""What a sweep runs: a callable with the arguments of its example call."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Sample:
    """One callable to export.

    Attributes:
        function: a module or a function of tensors.
        args: positional arguments of the example call.
        kwargs: keyword arguments of the example call.
        options: further arguments of `aotexport.export`.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)


Items = dict[str, Callable[[], Iterable[Sample]]]
"""What a sweep goes through: per row of its table a function that makes the row's samples, always the same."""


def spread(things: list[Any], count: int) -> list[Any]:
    """Return at most `count` of the things, evenly spaced, the first and the last among them."""
    if len(things) <= count:
        return things
    return [things[index * (len(things) - 1) // (count - 1)] for index in range(count)]
