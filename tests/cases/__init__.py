"""The zoo: small callables, one per semantic, shared by the conformance tests.

A case is a callable with the arguments of its example call, made anew each time. Its name is its id.
"""

import functools
import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

FILES = (
    *("aliases", "arrays", "autograd", "bodies", "dynamic", "functions", "hooks"),
    *("mixtures", "modules", "mutations", "operators", "randomness", "recurrence", "structure", "subclasses"),
    "values",
)


@dataclass(frozen=True)
class Case:
    """A callable to export.

    Attributes:
        name: words joined by underscores.
        make: returns the callable (a function or a fresh module) and its positional and keyword arguments.
        options: further arguments of `aotexport.export`.
        forward_only: why no functional graph is expected, as a part of the recorded reason; empty: one is.
        slow: whether other cases run all of its code, in less time: it is left to the slow tests.
    """

    name: str
    make: Callable[[], tuple[Any, tuple[Any, ...], dict[str, Any]]]
    options: dict[str, Any] = field(default_factory=dict)
    forward_only: str = ""
    slow: bool = False


CASES: dict[str, Case] = {}
DISAGREES = "it disagreed with eager execution when it was verified"
"""The recorded reason of a graph that verification drops; such a case says `verify`."""


def case(
    make_args: Callable[[], tuple[Any, ...]],
    *,
    forward_only: str = "",
    kwargs: Any = None,
    members: Any = None,
    slow: bool = False,
    **options: Any,
) -> Any:
    """Register a function of tensors, a module class, or the forward of a module, as a case.

    Args:
        make_args: returns fresh positional arguments.
        forward_only: see `Case`.
        kwargs: returns fresh keyword arguments.
        members: returns what a module has whose forward this is.
        slow: see `Case`.
        options: see `Case`.
    """

    def register(target: Any) -> Any:
        def make() -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
            import torch

            from tests.models import module

            torch.manual_seed(0)
            made = target() if isinstance(target, type) else module(target, **members()) if members else target
            return made, make_args(), kwargs() if kwargs else {}

        name = target.__name__ if not isinstance(target, type) else _snake(target.__name__)
        assert name not in CASES, f"two cases are called {name}"
        CASES[name] = Case(name, make, options, forward_only, slow)
        return target

    return register


slow_case = functools.partial(case, slow=True)


def _snake(name: str) -> str:
    return "".join(f"_{letter.lower()}" if letter.isupper() else letter for letter in name).lstrip("_")


def all_cases() -> list[Case]:
    """Return every case, in order of file and definition."""
    for file in FILES:
        importlib.import_module(f"tests.cases.{file}")
    return list(CASES.values())
