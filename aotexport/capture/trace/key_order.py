"""Find dicts that the model reads by key alone: calls may pass their keys in any order.

Further traces tell: one rotates the keys, one reverses them. If one of these differs, the code iterates over a dict,
and its order is part of the call.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any

import msgspec

from aotexport.model.call import ExampleCall
from aotexport.state.arguments import argument_tables
from aotexport_runtime.schema.program import ContainerChange, Parameter
from aotexport_runtime.schema.trees import Constant, Leaf, Mapping, Tree
from aotexport_runtime.submodules.python_state import ARGUMENT
from aotexport_runtime.values.trees import steps


@dataclass(frozen=True)
class KeyOrder:
    """Another order of the keys of some dicts.

    Attributes:
        paths: places of the dicts in the call; the name of `**kwargs` for keywords.
        order: returns the keys in that order.
    """

    paths: frozenset[str]
    order: Callable[[list[Any]], list[Any]]

    def put(self, call: ExampleCall, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Put the keys of dicts in order, in place; return the keywords, in order too.

        Args:
            call: the example call.
            args: positional arguments, as `call.rebuild` made them.
            kwargs: keyword arguments likewise.
        """
        for table in argument_tables(call, args, kwargs, defaults=False):
            if table.path in self.paths and not dataclasses.is_dataclass(table.owner):
                table.owner.clear()
                for key in self.order(list(table.items)):
                    table.owner[key] = table.items[key]
        if any(parameter.kind == "var_keyword" and parameter.name in self.paths for parameter in call.parameters):
            kwargs = {key: kwargs[key] for key in self.order(list(kwargs))}
        return kwargs


def other_orders(call: ExampleCall, changed: Collection[ContainerChange]) -> list[KeyOrder]:
    """Return the orders to trace a call in; none where it has no dict of several keys.

    Args:
        call: the example call.
        changed: its changes of containers of its caller: these keep their order.
    """
    known = {change.path for change in changed}
    sizes = {
        path: len(tree.keys)
        for parameter in call.parameters
        if parameter.name != ARGUMENT
        for path, tree in _mappings(parameter.tree, parameter.name)
        if len(tree.keys) > 1 and path not in known
    }
    orders: list[Callable[[list[Any]], list[Any]]] = [lambda keys: keys[::-1], lambda keys: keys[1:] + keys[:1]]
    # Two keys have only one other order.
    return [KeyOrder(frozenset(sizes), order) for order in orders[: min(max(sizes.values(), default=1) - 1, 2)]]


def _mappings(tree: Tree, path: str) -> Iterator[tuple[str, Mapping]]:
    if isinstance(tree, Leaf | Constant):
        return
    if isinstance(tree, Mapping):
        yield path, tree
    for step, item in zip(steps(tree), tree.items, strict=True):
        yield from _mappings(item, path + step)


def with_any_order(parameter: Parameter, paths: Collection[str]) -> Parameter:
    """Return a parameter whose dicts at `paths` may have their keys in any order in a call."""

    def visit(tree: Tree, path: str) -> Tree:
        if isinstance(tree, Leaf | Constant):
            return tree
        items = tuple(visit(item, path + step) for step, item in zip(steps(tree), tree.items, strict=True))
        if isinstance(tree, Mapping):
            return msgspec.structs.replace(tree, items=items, any_order=path in paths)
        return msgspec.structs.replace(tree, items=items)

    return msgspec.structs.replace(parameter, tree=visit(parameter.tree, parameter.name))
