"""The caller's lists, dicts, sets and objects, and their changes by a call."""

from __future__ import annotations

import dataclasses
from collections import UserDict, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from aotexport.errors import ExportFailed
from aotexport.model.call import BY_KEYWORD, ExampleCall, signature_of
from aotexport.model.containers import refill, same_item
from aotexport.model.structure import LeafIndex, dataclass_attributes, is_plain_object, object_attributes, tree_of
from aotexport_runtime.schema.program import ContainerChange
from aotexport_runtime.schema.trees import Constant, Leaf, Mapping, NamedFields, Sequence, Tree
from aotexport_runtime.values.structure import encode_key, is_key
from aotexport_runtime.values.trees import key_of, keys_of, steps


@dataclass(frozen=True)
class ArgumentContainer:
    """A container among the arguments.

    Attributes:
        path: its place in the call.
        container: the object itself.
        items: its items at the start, by key, position or field.
        is_default: whether it is the default of a parameter that is not passed.
    """

    path: str
    container: Any
    items: dict[Any, Any]
    is_default: bool = False

    def is_changed(self) -> bool:
        """Return whether its items have changed."""
        now = _items(self.container)
        return list(now) != list(self.items) or any(not same_item(self.items[key], item) for key, item in now.items())

    def restore(self) -> None:
        """Give the container the items that it had."""
        if isinstance(self.container, dict | UserDict):
            refill(self.container, self.items)
        elif _has_keys(self.container):
            refill(self.container, self.items.values())
        else:
            for name in _items(self.container).keys() - self.items.keys():
                object.__delattr__(self.container, name)
            for name, item in self.items.items():
                object.__setattr__(self.container, name, item)


def containers(call: ExampleCall, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[ArgumentContainer]:
    """Return the containers among arguments like the example's, one per place, including those of used defaults."""
    found: list[ArgumentContainer] = []

    def visit(tree: Tree, value: Any, path: str, is_default: bool) -> None:
        if isinstance(tree, Leaf | Constant):
            return
        if _is_changeable(value):
            found.append(ArgumentContainer(path, value, _items(value), is_default))
        if not isinstance(value, set | frozenset):
            children = _children(tree, value)
            for step, item, child in zip(steps(tree), tree.items, children, strict=True):
                visit(item, child, path + step, is_default)

    for name, tree, value, is_default in _passed(call, args, kwargs):
        visit(tree, value, name, is_default)
    return found


def container_changes(
    call: ExampleCall, before: list[ArgumentContainer], leaf_index: LeafIndex
) -> list[ContainerChange]:
    """Return the changes of the containers of a call since `before`, whose leaves are outputs of the program.

    Raises:
        ExportFailed: a change that a bundle cannot make.
    """
    known = {id(each.container) for each in before}
    found: list[ContainerChange] = []
    for each in before:
        if each.is_changed():
            _check_changeable(call, each)
            after = _items(each.container)
            items = [_item(each, key, item, known, leaf_index) for key, item in after.items()]
            keys = tuple(range(len(after))) if isinstance(each.container, set) else tuple(map(encode_key, after))
            found.append(ContainerChange(path=each.path, keys=keys, items=tuple(items)))
    return found


def check_changes(before: list[ArgumentContainer], recorded: Iterable[ContainerChange]) -> None:
    """Refuse a call whose changes of containers since `before` differ from those at capture."""
    keys = {change.path: list(map(key_of, change.keys)) for change in recorded}
    for each in before:
        now = list(range(len(each.container)) if isinstance(each.container, set) else _items(each.container))
        if each.is_changed() != (each.path in keys) or keys.get(each.path, []) not in ([], now):
            raise ExportFailed(
                f"the call changes `{each.path}` of its arguments otherwise than a trace of it shows. Return the new "
                "value instead"
            )


def _item(owner: ArgumentContainer, key: Any, item: Any, known: set[int], leaf_index: LeafIndex) -> Tree | None:
    if isinstance(owner.container, set):
        return tree_of(item, f"{owner.path}[{key}]", leaf_index, role="output")
    if key in owner.items and same_item(owner.items[key], item):
        return None
    path = f"{owner.path}[{key!r}]" if _has_keys(owner.container) else f"{owner.path}.{key}"
    if not is_key(key):
        raise ExportFailed(
            f"the call sets `{path}` of its arguments; keys may be strings, numbers, bytes, None or tuples"
        )
    if any(id(inner) in known for inner in _nested(item)):
        raise ExportFailed(
            f"the call puts one of the lists or dicts that it is given into `{path}` of its arguments, which a bundle "
            "cannot do. Put a copy there"
        )
    return tree_of(item, path, leaf_index, role="output")


def _check_changeable(call: ExampleCall, owner: ArgumentContainer) -> None:
    if owner.is_default:
        owner.restore()
    original = containers(call, call.args, call.kwargs)
    places = {each.path: each.container for each in original}
    same = [path for path, container in places.items() if container is places.get(owner.path)]
    reason = None
    if owner.is_default or any(default is places.get(owner.path) for default in _defaults(call.callable).values()):
        reason = "it is a default, which later calls find changed. Pass it"
    elif (
        missing := []
        if _has_keys(owner.container)
        else [name for name in owner.items if name not in _items(owner.container)]
    ):
        reason = f"deletes the attribute `{missing[0]}`, which a bundle cannot do. Set it to None"
    elif isinstance(owner.container, dict) and dataclasses.is_dataclass(owner.container):
        reason = f"a bundle changes no `{type(owner.container).__name__}`. Return the new value instead"
    elif len(same) > 1:
        reason = f"{' and '.join(f'`{path}`' for path in same)} are one object. Pass copies"
    if reason is not None:
        raise ExportFailed(f"the call changes `{owner.path}` of its arguments, and {reason}")


def _passed(call: ExampleCall, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[tuple[str, Tree, Any, bool]]:
    rest = list(args)
    defaults = _defaults(call.callable)
    for parameter in call.parameters:
        name, tree = parameter.name, parameter.tree
        if parameter.kind == "var_positional":
            yield name, tree, tuple(rest), False
            rest.clear()
        elif parameter.kind == "var_keyword":
            known = {each.name for each in call.parameters if each.kind in BY_KEYWORD}
            yield name, tree, {key: value for key, value in kwargs.items() if key not in known}, False
        elif rest and parameter.kind != "keyword_only":
            yield name, tree, rest.pop(0), False
        elif name in kwargs and parameter.kind in BY_KEYWORD:
            yield name, tree, kwargs[name], False
        elif _is_changeable(defaults.get(name)):
            yield name, tree, defaults[name], True


def _defaults(callable_: Any) -> dict[str, Any]:
    return {name: parameter.default for name, parameter in signature_of(callable_).parameters.items()}


def _children(tree: Tree, value: Any) -> list[Any]:
    if isinstance(tree, Mapping):
        return [value[key] for key in keys_of(tree)]
    if isinstance(value, dict | UserDict):
        return list(value.values())
    if isinstance(tree, Sequence) or isinstance(value, tuple | deque):
        return list(value)
    assert isinstance(tree, NamedFields)
    return [getattr(value, field) for field in tree.fields]


def _items(container: Any) -> dict[Any, Any]:
    if isinstance(container, dict | UserDict):
        return dict(container)
    if isinstance(container, set):
        return {repr(item): item for item in container}
    if isinstance(container, list | deque):
        return dict(enumerate(container))
    return dataclass_attributes(container) if dataclasses.is_dataclass(container) else object_attributes(container)


def _has_keys(container: Any) -> bool:
    return isinstance(container, list | dict | set | UserDict | deque)


def _is_changeable(value: Any) -> bool:
    is_record = not isinstance(value, type) and dataclasses.is_dataclass(value)
    return _has_keys(value) or is_record or is_plain_object(value)


def _nested(value: Any) -> Iterator[Any]:
    """Yield a value and the containers in it, each once."""
    pending, seen = [value], set[int]()
    while pending:
        value = pending.pop()
        if id(value) in seen or not (isinstance(value, tuple) or _is_changeable(value)):
            continue
        seen.add(id(value))
        yield value
        pending += list(value) if isinstance(value, tuple) else list(_items(value).values())
