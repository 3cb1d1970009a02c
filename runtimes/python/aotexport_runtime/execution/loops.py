"""Loops and lists whose lengths the data of a call decide, within limits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from aotexport_runtime.errors import CheckFailed

_OVER_ROWS = {"higher_order::scan": 2, "higher_order::map_impl": 1}
"""Loops over the rows of tensors, with the position of these among the operands."""

_UNTIL = ("higher_order::while_loop", "higher_order::while_loop_stack_output")


class Budget:
    """The operators that a call may yet run in the bodies of a program; calls of several threads share it."""

    def __init__(self, most: int) -> None:
        self._most, self._spent = most, 0

    def begin(self) -> None:
        """Begin a call."""
        self._spent = 0

    def spend(self, count: int) -> None:
        """Refuse a body of `count` operators (`CheckFailed`) if too many run; it may not come to an end."""
        self._spent += count
        if self._spent > self._most:
            raise CheckFailed(f"a call runs more than {self._most} operators in bodies (`Limits.calls` of `load`)")


def limited(op: str, operator: Callable[..., Any], most: int) -> Callable[..., Any]:
    """Return an operator of `higher_order.OPERATORS` that makes at most so many steps if it is a loop.

    One over rows refuses tensors with other numbers of rows than the first, and without any, as eager does.
    """
    if op in _OVER_ROWS:
        place = _OVER_ROWS[op]

        def over_rows(symbols: dict[str, int], *operands: Any) -> Any:
            counts = [tensor.shape[0] if tensor.dim() else 0 for tensor in operands[place]]
            if not counts or any(count == 0 or count != counts[0] for count in counts):
                given = ", ".join(map(str, counts)) or "no tensors"
                raise CheckFailed(f"a loop goes over rows of tensors with one number of them, not 0; given are {given}")
            if counts[0] > most:
                raise _too_many(counts[0], most)
            return operator(symbols, *operands)

        return over_rows
    if op in _UNTIL:
        return lambda symbols, condition, *operands: operator(symbols, _counted(condition, most), *operands)
    return operator


def _counted(condition: Callable[..., Any], most: int) -> Callable[..., Any]:
    """Return the condition of a loop that may hold so many times."""
    asked = 0

    def call(*operands: Any) -> Any:
        nonlocal asked
        asked += 1
        if asked > most + 1:
            raise _too_many(asked - 1, most)
        return condition(*operands)

    return call


def _too_many(steps: int, most: int) -> CheckFailed:
    return CheckFailed(f"a loop makes step {steps}; at most {most} are made (`Limits.iterations` of `load`)")


def _parts(self: Any, chunks: int, dim: int = 0) -> int:
    rows = self.shape[dim]
    return -(-rows // -(-rows // chunks)) if rows and chunks > 0 else 0


_COUNTS: dict[str, Callable[..., int]] = {
    **dict.fromkeys(("unbind.int", "unbind_copy.int"), lambda self, dim=0: self.shape[dim]),
    **dict.fromkeys(
        ("split.Tensor", "split_copy.Tensor", "unsafe_split.Tensor"),
        lambda self, split_size, dim=0: -(-self.shape[dim] // split_size) if split_size > 0 else 0,
    ),
    **dict.fromkeys(("chunk.default", "unsafe_chunk.default"), _parts),
    **dict.fromkeys(
        ("hsplit.int", "vsplit.int", "dsplit.int", "tensor_split.sections"), lambda self, sections, dim=0: sections
    ),
    "tensor_split.tensor_indices_or_sections": lambda self, tensor, dim=0: 0 if tensor.dim() else int(tensor),
}
"""Operators whose results are as many as the sizes of a tensor say, with their number."""


def counted(op: str, function: Callable[..., Any], declared: int) -> Callable[..., Any]:
    """Return `function`, which runs an operator, with the check that it gives as many results as declared."""
    count = _COUNTS.get(op.removeprefix("aten::"), lambda *_, **__: 0)

    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            found = count(*args, **kwargs)
        except (TypeError, IndexError):
            # The operator says what is wrong with its arguments.
            found = 0
        if found <= declared:
            results = function(*args, **kwargs)
            found = len(results)
            if found == declared:
                return results
        raise CheckFailed(f"operator `{op}` gives {found} results, and the graph has {declared}")

    return call
