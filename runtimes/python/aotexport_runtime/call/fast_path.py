"""The fast path of a call: a generated function that serves the calls that a program gets most often.

Invariant: a call that it serves is admitted by the explaining path as well, with the same inputs and symbols, and
served by the functional graph, if there is one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from aotexport_runtime.engines.functional.autograd import apply_joint
from aotexport_runtime.engines.functional.guards import DIRECT
from aotexport_runtime.engines.functional.joint import JointProgram
from aotexport_runtime.guards.kinds import torch_tensors
from aotexport_runtime.guards.quick_path import Call, bind, quick_path
from aotexport_runtime.guards.rule import GuardSource, Row, input_name, rows
from aotexport_runtime.guards.signature import Signature
from aotexport_runtime.schema.program import Program, StateInput


@dataclass(frozen=True, kw_only=True)
class FastPath:
    """The guards of a fast path, and the functions that it calls.

    Attributes:
        program: its record.
        signature: binds calls.
        rows: guards of the calls that it serves.
        joint: a joint graph without epilogues, whose results are the program's outputs; None: there is none.
        serve: runs the program on checked inputs and symbols; returns the call's result.
        unflatten: puts the program's outputs into the structure of the call's result.
        fallback: takes the calls that the fast path does not serve.
    """

    program: Program
    signature: Signature
    rows: Sequence[Row]
    joint: JointProgram | None
    serve: Callable[[list[Any], dict[str, int]], Any]
    unflatten: Callable[[Any], Any]
    fallback: Call

    def function(self) -> Call:
        """Return a function for every call of the program; the fallback, where the program has no fast path."""
        passed = {index for index, spec in enumerate(self.program.inputs) if not isinstance(spec, StateInput)}
        positional = self.signature.plain_leaves
        if positional is None or set(positional) != passed:
            return self.fallback
        source = GuardSource(kind=torch_tensors())
        asked = [*self.rows, *(rows(DIRECT, self.joint.plain) if self.joint is not None else [])]
        label = f"{self.program.name} call"
        return quick_path(source, bind(source, positional), asked, self._served, self.fallback, label)

    def _served(self, source: GuardSource) -> str:
        """Return the expression that runs the program on the inputs."""
        inputs = ", ".join(map(input_name, range(len(self.program.inputs))))
        symbols = ", ".join(f"{source.constant(symbol)}: {name}" for symbol, name in source.symbols.items())
        if self.joint is None:
            return f"{source.constant(self.serve)}([{inputs}], {{{symbols}}})"
        applied = f"{source.constant(apply_joint)}({source.constant(self.joint)}, {{{symbols}}}, {inputs})"
        return f"{source.constant(self.unflatten)}({applied})"
