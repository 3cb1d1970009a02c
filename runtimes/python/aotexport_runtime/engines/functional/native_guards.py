"""Guards of native code, beside those of the functional graph that it was compiled from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from aotexport_runtime.engines.cpu.engine import Libraries
from aotexport_runtime.engines.lowered import Lowered
from aotexport_runtime.guards.rule import GuardRule, GuardSource, input_name


@dataclass(frozen=True)
class NativeCalls:
    """Facts for guards of the calls that native code of a functional graph serves.

    Attributes:
        native: the code.
        gradients: per input of the graph the index of its gradient; None: it is no joint graph.
        symbols: of the program.
        count: number of inputs.
    """

    native: Lowered | Libraries
    gradients: Sequence[int | None] | None
    symbols: Sequence[str]
    count: int


def _native(calls: NativeCalls) -> list[NativeCalls]:
    return [calls]


def _all_require_grad(source: GuardSource, calls: NativeCalls) -> str:
    wanted = [index for index, gradient in enumerate(calls.gradients or ()) if gradient is not None]
    return " and ".join(f"{input_name(index)}.requires_grad" for index in wanted) or "True"


def _is_served(source: GuardSource, calls: NativeCalls) -> str:
    inputs = ", ".join(map(input_name, range(calls.count)))
    symbols = ", ".join(f"{source.constant(symbol)}: {source.symbols[symbol]}" for symbol in calls.symbols)
    return source.ask(calls.native.serves, f"[{inputs}]", f"{{{symbols}}}")


NATIVE: tuple[GuardRule[NativeCalls, NativeCalls], ...] = (
    GuardRule(
        name="every gradient",
        cost="tensor",
        of=_native,
        holds=_all_require_grad,
        message=lambda calls, call: "not every gradient is wanted",
    ),
    GuardRule(
        name="native code",
        cost="memory",
        of=_native,
        holds=_is_served,
        message=lambda calls, call: calls.native.why_not(call.symbols),
    ),
)
"""Guards of the calls that native code serves; its functional graph serves the others."""
