"""A call as flat lists: its arguments from a list of leaves, and the leaves of its result.

The whole result of a call is its return value, and the new items of the caller's containers.
"""

from __future__ import annotations

import operator
from collections import UserDict, deque
from collections.abc import Callable
from typing import Any

import torch

from aotexport_runtime.errors import NotSupported
from aotexport_runtime.execution.codegen import Environment, constant_value
from aotexport_runtime.guards.signature import Signature
from aotexport_runtime.schema.program import ContainerChange, Program, StateInput
from aotexport_runtime.schema.trees import Constant, Instance, Leaf, Mapping, NamedFields, Sequence, Tree
from aotexport_runtime.values.trees import builder, key_of, keys_of, steps


def arguments_of(program: Program) -> Any:
    """Return a function from the flat tensors of a call, and the state, to the call's `(args, kwargs)`."""
    environment = Environment()
    builders = [
        (parameter, builder(parameter.tree, lambda leaf: constant_value(leaf.value, environment)))
        for parameter in program.parameters
    ]

    def arguments(values: list[Any], state: dict[str, torch.Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        given = iter(values)
        flat = [state[spec.name] if isinstance(spec, StateInput) else next(given) for spec in program.inputs]
        args: list[Any] = []
        kwargs: dict[str, Any] = {}
        for parameter, build in builders:
            value = build(flat)
            if parameter.kind == "var_positional":
                args.extend(value)
            elif parameter.kind == "var_keyword":
                kwargs.update(value)
            elif parameter.kind == "keyword_only":
                kwargs[parameter.name] = value
            else:
                args.append(value)
        return tuple(args), kwargs

    return arguments


def flat_outputs(tree: Tree, value: Any) -> list[tuple[str, Any]]:
    """Return the tensor and size leaves of a returned value, walked by its tree, with their paths.

    `NotSupported`: the tree has an array where the value has none.
    """
    found: list[tuple[str, Any]] = []
    made: dict[int, torch.Tensor] = {}

    def visit(tree: Tree, value: Any, path: str) -> None:
        if isinstance(tree, Leaf):
            found.append((path, _tensor_of(value, path, made) if tree.array else value))
            return
        if not isinstance(tree, Constant):
            for step, child, item in zip(steps(tree), tree.items, _items(tree, value), strict=True):
                visit(child, item, path + step)

    visit(tree, value, "output")
    return found


def _tensor_of(array: Any, path: str, made: dict[int, torch.Tensor]) -> torch.Tensor:
    """Return a tensor with the memory of an array, a new one per array."""
    from aotexport_runtime.values.arrays import why_not

    if (reason := why_not(array)) is not None:
        raise NotSupported(f"`{path}`, a `{type(array).__name__}`, {reason}")
    return made.setdefault(id(array), torch.from_numpy(array))


def _items(tree: Sequence | Mapping | NamedFields | Instance, value: Any) -> list[Any]:
    if isinstance(tree, Mapping):
        return [value[key] for key in keys_of(tree)]
    if isinstance(tree, Sequence) or isinstance(value, tuple):
        return list(value)
    read: Any = operator.getitem if isinstance(value, dict) else getattr
    return [read(value, name) for name in tree.fields]


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
