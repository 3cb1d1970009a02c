"""The variants of a program: captures of one behaviour for calls of several signatures, chosen by their guards."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from aotexport_runtime.call.plan import Plan
from aotexport_runtime.errors import CallInvalid
from aotexport_runtime.schema.program import Program, StateInput
from aotexport_runtime.schema.trees import Leaf
from aotexport_runtime.values.trees import leaves


class Variants:
    """Several plans of one program; a call runs the first that it fits.

    Variants that were captured with one tensor in several places come first, since a call with one tensor there fits
    the others as well: the model's code may ask whether two of its arguments are one.
    """

    def __init__(self, programs: Sequence[Program], plan: Callable[[str], Plan]) -> None:
        """Prepare variants in order of preference, the program's own first; `plan` makes the plan of one."""
        self._names = [program.name for program in programs]
        self._order = [program.name for program in sorted(programs, key=_shared_tensors, reverse=True)]
        self._make = plan
        self._plans: dict[str, Plan] = {}

    def plan(self, name: str) -> Plan:
        """Return the plan of variant `name`."""
        plan = self._plans.get(name)
        if plan is None:
            plan = self._plans[name] = self._make(name)
        return plan

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the first variant that the call fits.

        Raises:
            CallInvalid: it fits none; lists every violation, per variant.
        """
        unfit: dict[str, list[str]] = {}
        for name in self._order:
            plan = self.plan(name)
            call = plan.bind(args, kwargs)
            if not call.violations:
                return plan.run(call)
            unfit[name] = call.violations
        reasons = [f"variant `{name}`: {violation}" for name in self._names for violation in unfit[name]]
        raise CallInvalid(self._names[0], reasons)


def _shared_tensors(program: Program) -> int:
    """Return how many arguments are tensors that also stand elsewhere, or the module's own."""
    indices = [leaf.index for p in program.parameters for _, leaf in leaves(p.tree) if isinstance(leaf, Leaf)]
    own = [index for index in set(indices) if isinstance(program.inputs[index], StateInput)]
    return len(indices) - len(set(indices)) + len(own)
