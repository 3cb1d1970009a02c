"""Checks on the values of a call, and the values that a failing check shows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from aotexport_runtime.allowed.operators import INFIX
from aotexport_runtime.errors import CheckFailed
from aotexport_runtime.rewrite.names import CHECK
from aotexport_runtime.schema.graph import Graph, Node


def check(condition: Any, message: str, where: str, *values: Any) -> None:
    """Pass where `condition` holds.

    Args:
        condition: the condition.
        message: its meaning, as the bundle says.
        where: the user's line; empty: unknown.
        values: the values that the condition was computed from.

    Raises:
        CheckFailed: it does not hold.
    """
    if not condition:
        shown = ", ".join(repr(value) for value in values)
        raise CheckFailed(f"{f'{where}: ' if where else ''}{message}. The call has {shown}")


def is_check(node: Node) -> bool:
    """Return whether `node` is a check that `check` can make."""
    return node.op == CHECK and len(node.args) == 2 and not node.kwargs and isinstance(node.args[0], str)


def place(graph: Graph, node: Node) -> str:
    """Return the user's line of `node`; empty: unknown."""
    if node.source is None:
        return ""
    line = graph.sources[node.source]
    return f"{line.file}:{line.line} in {line.function}"


def shown_values(nodes: Sequence[Node]) -> dict[str, list[str]]:
    """Return, per check, the names of the values that its condition compares."""
    by_name = {node.name: node for node in nodes}
    return {node.name: _compared(str(node.args[0]), by_name) for node in nodes if is_check(node)}


def _compared(name: str, by_name: Mapping[str, Node]) -> list[str]:
    node = by_name.get(name)
    if node is None or (node.op not in INFIX and node.op != "python::not"):
        return [name]
    operands = [argument for argument in node.args if isinstance(argument, str)]
    if node.op == "python::not" and len(operands) == 1:
        return _compared(operands[0], by_name)
    return operands or [name]
