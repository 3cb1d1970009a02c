"""Graphs as data: the values that nodes use, and nodes that use others in their place. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from aotexport_runtime.schema.graph import Node
from aotexport_runtime.schema.values import Argument
from aotexport_runtime.validate.arguments import references

CHECK = "aten::_assert_scalar.default"
"""The operator that checks a condition on values."""


def operands(node: Node) -> list[str]:
    """Return the names of the values that a node takes, with repetitions."""
    return names_in((*node.args, *node.kwargs.values()))


def names_in(arguments: Iterable[Argument]) -> list[str]:
    """Return the names of the values that arguments refer to, with repetitions."""
    return [name for argument in arguments for name in references(argument)]


def renamed(node: Node, names: Mapping[str, str]) -> Node:
    """Return a node with other names for its operands."""
    kwargs = {keyword: rename(argument, names) for keyword, argument in node.kwargs.items()}
    return msgspec.structs.replace(node, args=[rename(argument, names) for argument in node.args], kwargs=kwargs)


def rename(argument: Any, names: Mapping[str, str]) -> Any:
    """Return an argument with other names for the values that it refers to."""
    if isinstance(argument, str):
        return names.get(argument, argument)
    return [rename(item, names) for item in argument] if isinstance(argument, list) else argument
