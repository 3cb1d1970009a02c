"""The variants of a program: captures of one behaviour for calls of several signatures, chosen by their guards."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from aotexport_runtime.errors import CallInvalid


class Plan(Protocol):
    """A program of any engine, ready to be called."""

    def bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], dict[str, int], list[str]]:
        """Return the program's inputs, the value of each symbol, and one sentence per violation of a guard."""
        ...

    def run(self, inputs: list[Any], symbols: dict[str, int]) -> Any:
        """Run the program on what `bind` gave without violations."""
        ...


class Variants:
    """Several plans of one program; a call runs the first that it fits."""

    def __init__(self, names: Sequence[str], plan: Callable[[str], Plan]) -> None:
        """Prepare the variants of a program.

        Args:
            names: their names, in order of preference; the first is the program's own.
            plan: makes the plan of a variant; asked when a call reaches it for the first time.
        """
        self._names = names
        self._make = plan
        self._plans: dict[str, Plan] = {}

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the first variant that the call fits.

        Raises:
            CallInvalid: it fits none; lists every violation, per variant.
        """
        unfit: list[str] = []
        for name in self._names:
            plan = self._plans.get(name)
            if plan is None:
                plan = self._plans[name] = self._make(name)
            inputs, symbols, violations = plan.bind(args, kwargs)
            if not violations:
                return plan.run(inputs, symbols)
            unfit += [f"variant `{name}`: {violation}" for violation in violations]
        raise CallInvalid(self._names[0], unfit)
