"""The contract of engines: guard rows, run, epilogue; and that of native code of a functional graph. No torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from aotexport_runtime.guards.rule import GuardSource, Row
from aotexport_runtime.schema.program import Partition

if TYPE_CHECKING:
    from aotexport_runtime.execution.codegen import Function
    from aotexport_runtime.rewrite.partition import Subgraph


class Engine(Protocol):
    """What serves calls of one program, by one of its graphs or models.

    `select.py` chooses the engines of a program; a call runs the first of them whose guards it meets.

    Attributes:
        name: its name in `select.py`.
        rows: guards of the calls that it serves, beside those of the program; quick paths ask them.
    """

    name: str
    rows: Sequence[Row] = ()

    def why_not(self, inputs: list[Any], symbols: dict[str, int]) -> str | None:
        """Return why it does not serve a call that meets the program's guards; None: it does."""
        return None

    def run(self, inputs: list[Any], symbols: dict[str, int], because: str = "") -> Sequence[Any]:
        """Run a call that it serves, with all that the call changes; return the program's outputs.

        `inputs` are borrowed; `because`: why no engine before it serves the call.
        """
        ...

    def expression(self, source: GuardSource) -> str | None:
        """Return source of the outputs of a call that meets `rows`, by the variables of `source`.

        None: quick paths call `run`.
        """
        return None

    def held_expression(self, source: GuardSource) -> str | None:
        """Return source of the outputs that reads no state, for calls that meet `rows` as held; None: there is none."""
        return None


class Native(Protocol):
    """Native code that runs a functional graph in place of generated code.

    Attributes:
        target: its name in `select.py`.
        partition: what its forward saves; None: the graph's first partition, or it is no joint graph.
        is_detached: whether it runs no operators of torch, which would record gradients.
        holds_state: whether it takes calls alone whose state is that of the load, at its versions.
        is_held: returns whether it takes calls now whose arguments fit, with None in place of the state; None: it does
            not know.
        saved: how many tensors its forward saves of its own choice, for a backward that takes every tangent, none a
            batch; None: those of the partition.
    """

    target: str
    partition: Partition | None = None
    is_detached: bool = False
    holds_state: bool = False
    is_held: Callable[[], bool] | None = None
    saved: int | None = None

    def why_not(self, inputs: Sequence[Any], symbols: Mapping[str, int]) -> str | None:
        """Return why it does not take a call with these inputs and sizes; None: it does."""
        ...

    def why_not_backward(self, defined: Sequence[bool]) -> str | None:
        """Return why it does not take a backward pass in which these tangents are defined; None: it does."""
        return None

    def forward_of(self, subgraph: Subgraph, fallback: Callable[[], Function]) -> Function:
        """Return a function that runs the forward; where that fails, one that `fallback` makes may run."""
        ...

    def backward_of(self, subgraph: Subgraph, fallback: Callable[[], Function]) -> Function:
        """Return a function that runs the backward; see `forward_of`."""
        return fallback()
