"""The caller's lists, dicts, sets and objects, and their changes by a call."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

from aotexport.errors import ExportFailed
from aotexport.model.call import ExampleCall, signature_of
from aotexport.model.structure import LeafIndex, is_plain_object, tree_of
from aotexport.process.objects import is_a
from aotexport.state.tables import CONTAINERS, Table, items_of, same_item, tables_in
from aotexport_runtime.schema.program import ContainerChange
from aotexport_runtime.schema.trees import Constant, Tree
from aotexport_runtime.values.structure import encode_key, is_key
from aotexport_runtime.values.trees import key_of


def argument_tables(
    call: ExampleCall, args: tuple[Any, ...], kwargs: dict[str, Any], *, defaults: bool = True
) -> list[Table]:
    """Return the containers among arguments like the example's, one per place; `defaults`: also those of used ones."""
    bound = signature_of(call.callable).bind(*args, **kwargs)
    if defaults:
        bound.apply_defaults()
    trees = {parameter.name: parameter.tree for parameter in call.parameters}
    return [
        table
        for name, value in bound.arguments.items()
        if not isinstance(trees.get(name), Constant | None)
        for table in tables_in(value, name, enters=is_plain_object)
    ]


def container_changes(call: ExampleCall, before: list[Table], leaf_index: LeafIndex) -> list[ContainerChange]:
    """Return the changes of the containers of a call since `before`, whose leaves are outputs of the program.

    Raises:
        ExportFailed: a change that a bundle cannot make.
    """
    known = {id(table.owner) for table in before}
    found: list[ContainerChange] = []
    for table in before:
        if table.has_changed():
            _check_changeable(call, table)
            after = _items(table)
            items = tuple(_item(table, key, item, known, leaf_index) for key, item in after.items())
            found.append(ContainerChange(path=table.path, keys=tuple(map(encode_key, after)), items=items))
    return found


def check_changes(before: list[Table], recorded: Iterable[ContainerChange]) -> None:
    """Refuse a call whose changes of containers since `before` differ from those at capture."""
    keys = {change.path: list(map(key_of, change.keys)) for change in recorded}
    for table in before:
        if table.has_changed() != (table.path in keys) or keys.get(table.path, []) not in ([], list(_items(table))):
            raise ExportFailed(
                f"the call changes `{table.path}` of its arguments otherwise than a trace of it shows. Return the new "
                "value instead"
            )


def _items(table: Table) -> dict[Any, Any]:
    """Return the items of a container now; those of a set by number."""
    items = items_of(table.owner)
    return dict(enumerate(items.values())) if is_a(table.owner, set) else items


def _item(table: Table, key: Any, item: Any, known: set[int], leaf_index: LeafIndex) -> Tree | None:
    if is_a(table.owner, set):
        return tree_of(item, f"{table.path}[{key}]", leaf_index, role="output")
    if key in table.items and same_item(table.items[key], item):
        return None
    path = table.path_of(key)
    if not is_key(key):
        raise ExportFailed(
            f"the call sets `{path}` of its arguments; keys may be strings, numbers, bytes, None or tuples"
        )
    if any(id(inner.owner) in known for inner in tables_in(item, path, enters=is_plain_object, seen=set())):
        raise ExportFailed(
            f"the call puts one of the lists or dicts that it is given into `{path}` of its arguments, which a bundle "
            "cannot do. Put a copy there"
        )
    return tree_of(item, path, leaf_index, role="output")


def _check_changeable(call: ExampleCall, table: Table) -> None:
    signature = signature_of(call.callable)
    is_default = table.root not in signature.bind(*call.args, **call.kwargs).arguments
    if is_default:
        table.put_back()
    places = {each.path: each.owner for each in argument_tables(call, call.args, call.kwargs)}
    same = [path for path, owner in places.items() if owner is places.get(table.path)]
    missing = () if is_a(table.owner, *CONTAINERS) else table.items.keys() - items_of(table.owner).keys()
    reason = None
    if is_default or any(each.default is places.get(table.path) for each in signature.parameters.values()):
        reason = "it is a default, which later calls find changed. Pass it"
    elif missing:
        reason = f"deletes the attribute `{min(missing)}`, which a bundle cannot do. Set it to None"
    elif is_a(table.owner, dict) and dataclasses.is_dataclass(table.owner):
        reason = f"a bundle changes no `{type(table.owner).__name__}`. Return the new value instead"
    elif len(same) > 1:
        reason = f"{' and '.join(f'`{path}`' for path in same)} are one object. Pass copies"
    if reason is not None:
        raise ExportFailed(f"the call changes `{table.path}` of its arguments, and {reason}")
