"""Rules of nested values, and of the caller's containers that a call changes."""

from __future__ import annotations

from collections.abc import Iterator

from aotexport_runtime.errors import Place
from aotexport_runtime.schema.program import ContainerChange, Program
from aotexport_runtime.schema.trees import Constant, Leaf, Mapping, NamedFields, PythonValue, Sequence, Tree
from aotexport_runtime.validate.arguments import check_constant
from aotexport_runtime.validate.subclasses import check_plain
from aotexport_runtime.values.python_values import check_keys, check_python_value
from aotexport_runtime.values.trees import check_tree, leaves, steps


def check_values(tree: Tree, count: int, where: Place) -> None:
    """Refuse a malformed tree of arguments or results.

    Args:
        tree: the tree.
        count: number of inputs, or outputs, that its leaves index.
        where: for errors.

    Raises:
        BundleInvalid: names the fault.
    """
    check_tree(tree, count, where=where)
    check_plain(tree, where)
    for _, leaf in leaves(tree):
        if isinstance(leaf, Constant):
            if isinstance(leaf.value, PythonValue):
                check_python_value(leaf.value, where)
            else:
                check_constant(leaf.value, "a constant of a tree", where)


def check_container_changes(program: Program, where: Place) -> None:
    """Refuse changes of containers that no call passes, or that such a container cannot take.

    Raises:
        BundleInvalid: names the fault.
    """
    passed = {path: tree for p in program.parameters if not p.optional for path, tree in _containers(p.tree, p.name)}
    for index, change in enumerate(program.container_changes):
        with where.at("container_changes", index) as here:
            _check_change(change, passed.get(change.path), here)


def _check_change(change: ContainerChange, tree: Tree | None, where: Place) -> None:
    if tree is None:
        raise where.invalid(
            f"every call must pass the changed container {change.path[:80]!r}", "reference-missing/container"
        )
    check_keys(change.keys, where)
    if len(set(change.keys)) != len(change.keys) or len(change.items) != len(change.keys):
        raise where.invalid(
            f"the keys of the changed container {change.path[:80]!r} do not fit", "program-malformed/container-keys"
        )
    if not _takes(tree, change):
        raise where.invalid(
            f"the container {change.path[:80]!r} cannot be changed so", "program-malformed/container-change"
        )


def _containers(tree: Tree, path: str) -> Iterator[tuple[str, Tree]]:
    if isinstance(tree, Leaf | Constant):
        return
    yield path, tree
    for step, item in zip(steps(tree), tree.items, strict=True):
        yield from _containers(item, path + step)


def _takes(tree: Tree, change: ContainerChange) -> bool:
    """Return whether a container can be changed so, and has the items that stay."""
    stays = {key for key, item in zip(change.keys, change.items, strict=True) if item is None}
    if isinstance(tree, Sequence) and tree.type == "set":
        # A set has no keys: all of its items are new.
        return not stays and all(isinstance(item, Constant) for item in change.items)
    if isinstance(tree, Sequence) and tree.type in ("list", "deque"):
        return change.keys == tuple(range(len(change.keys))) and stays <= set(range(len(tree.items)))
    if isinstance(tree, Mapping):
        return stays <= set(tree.keys)
    if not isinstance(tree, NamedFields) or tree.type not in ("dataclass", "object"):
        return False
    known, names = set(tree.fields), [key for key in change.keys if isinstance(key, str)]
    plain = all(name.isidentifier() and not name.startswith("__") for name in names)
    return plain and len(names) == len(change.keys) and stays <= known <= set(names)
