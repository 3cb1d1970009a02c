"""Results of operators on fake tensors, shared by the traces of an export.

A fake tensor mode keeps the sizes, strides and dtypes of results with the shape environment of its trace. Programs of
one model compute mostly the same, and their traces name the same sizes alike.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch

# Source: torch 2.13, torch/_subclasses/fake_tensor.py, `_cached_dispatch_impl`.
from torch.fx.experimental.symbolic_shapes import ShapeEnv


@dataclass(frozen=True)
class _Knowledge:
    """What a shape environment knows of its symbols, and the autocast that surrounds its trace."""

    guards: frozenset[Any]
    ranges: dict[Any, Any]
    replaced: frozenset[Any]
    divisible: frozenset[Any]
    assertions: int
    autocast: tuple[Any, ...]

    @classmethod
    def of(cls, environment: ShapeEnv) -> _Knowledge:
        return cls(
            frozenset(guard.expr for guard in environment.guards),
            dict(environment.var_to_range),
            frozenset(environment.replacements),
            frozenset(environment.divisible),
            environment.num_deferred_runtime_asserts,
            tuple((torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda")),
        )

    def says_no_more_than(self, other: _Knowledge) -> bool:
        """Return whether all that this says of the symbols of `other` is known there.

        An equation between two symbols says no more of the other one where a symbol is not there, and ranges are equal.
        """
        more = self.guards - other.guards
        return (
            other.guards <= self.guards
            and other.ranges.items() <= self.ranges.items()
            and self.replaced & other.ranges.keys() == other.replaced
            and (self.divisible, self.assertions, self.autocast) == (other.divisible, other.assertions, other.autocast)
            and all(isinstance(guard, sympy.Eq) and _names_another(guard.args, other.ranges) for guard in more)
        )


def _names_another(sides: tuple[Any, ...], known: dict[Any, Any]) -> bool:
    return all(side.is_Symbol for side in sides) and any(side not in known for side in sides)


@dataclass
class _Table:
    """Results that were computed with some knowledge."""

    knowledge: _Knowledge
    results: dict[Any, Any] = field(default_factory=dict)


_tables: ContextVar[list[_Table] | None] = ContextVar("tables", default=None)


@contextlib.contextmanager
def results_shared() -> Iterator[None]:
    """Let traces in the block take results from one another."""
    token = _tables.set([])
    try:
        yield
    finally:
        _tables.reset(token)


class SharedResults(dict[Any, Any]):
    """The results that a shape environment keeps: its own, and those of traces that knew as much of the sizes.

    A result is for other traces too if computing it neither told the environment anything nor made an assumption: those
    belong to the program that is traced.

    Attributes:
        assumptions: how often a trace has assumed something without a guard, or taken a result that rests on that.
    """

    def __init__(self, environment: ShapeEnv) -> None:
        """Begin with nothing of its own.

        Args:
            environment: it will keep its results here; it knows the declared sizes already.
        """
        super().__init__()
        self.assumptions = 0
        self._environment = environment
        self._knowledge = _Knowledge.of(environment)
        self._begun: dict[Any, int] = {}
        tables = _tables.get()
        known = [] if tables is None else [t for t in tables if t.knowledge.says_no_more_than(self._knowledge)]
        own = next((table for table in known if table.knowledge == self._knowledge), None)
        if own is None:
            own = _Table(self._knowledge)
            if tables is not None:
                tables.append(own)
        self._own = own.results
        self._others = [table.results for table in known]
        environment.fake_tensor_cache = self

    def get(self, key: Any, default: Any = None) -> Any:
        """Return a known result, or `default`: the mode will compute it then."""
        found = super().get(key)
        if found is not None:
            # What is computed from a result of this trace alone is of this trace alone.
            self.assumptions += key not in self._own
            return found
        for results in self._others:
            if (found := results.get(key)) is not None:
                return found
        self._begun[key] = self.assumptions
        return default

    def __setitem__(self, key: Any, value: Any) -> None:
        """Keep a result that the mode has computed."""
        super().__setitem__(key, value)
        is_general = self._begun.pop(key, None) == self.assumptions
        if is_general and _Knowledge.of(self._environment) == self._knowledge:
            self._own[key] = value
