"""The whole result of a call as one value: its return value, and the new items of the caller's containers."""

from __future__ import annotations

import operator
from collections import UserDict, deque
from collections.abc import Callable
from typing import Any

from aotexport_runtime.execution.codegen import Environment, constant_value
from aotexport_runtime.guards.signature import Signature
from aotexport_runtime.schema.program import ContainerChange, Program
from aotexport_runtime.schema.trees import Sequence, Tree
from aotexport_runtime.values.trees import key_of


def whole_result_tree(program: Program) -> Tree:
    """Return the structure of the whole result of `program`: of its return value, where it changes no containers."""
    if not program.container_changes:
        return program.output_tree
    put = [tuple(item for item in change.items if item is not None) for change in program.container_changes]
    return Sequence(type="tuple", items=(program.output_tree, *(Sequence(type="tuple", items=items) for items in put)))


def returning_whole_result(program: Program, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls `function`, which computes `program`, and returns the whole result."""
    if not program.container_changes:
        return function
    environment = Environment()
    paths = [change.path for change in program.container_changes]
    signature = Signature(program.parameters, lambda leaf: constant_value(leaf.value, environment), paths)

    def call(*args: Any, **kwargs: Any) -> Any:
        containers: dict[str, Any] = {}
        signature.flatten(args, kwargs, [None] * len(program.inputs), containers)
        value = function(*args, **kwargs)
        return (value, *(_put(change, containers[change.path]) for change in program.container_changes))

    return call


def _put(change: ContainerChange, container: Any) -> tuple[Any, ...]:
    keys = [key_of(key) for key, item in zip(change.keys, change.items, strict=True) if item is not None]
    if isinstance(container, set):
        return tuple(container)
    read: Any = operator.getitem if isinstance(container, list | deque | dict | UserDict) else getattr
    return tuple(read(container, key) for key in keys)
