"""Rules of NumPy arrays among arguments and results, and of the caller's containers that a call changes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import get_args

from aotexport_runtime.errors import Place
from aotexport_runtime.schema.program import ArgumentInput, ContainerChange, Program
from aotexport_runtime.schema.trees import Constant, Leaf, Mapping, NamedFields, NumpyType, Sequence, Tree
from aotexport_runtime.schema.values import TensorMeta
from aotexport_runtime.validate.trees import check_keys
from aotexport_runtime.values.trees import arrays_in, leaves, steps

_DTYPES = frozenset((*get_args(NumpyType), "complex64", "complex128"))
"""Element types that torch and NumPy both have."""


def check_arrays(program: Program, where: Place) -> None:
    """Refuse arrays that no call can pass or return."""
    for index in _arrays([parameter.tree for parameter in program.parameters], "input", where):
        spec = program.inputs[index]
        if not isinstance(spec, ArgumentInput) or spec.subclass is not None or spec.meta.requires_grad:
            raise where.invalid(
                f"input {index} is an array, and no plain argument without gradients", "structure-malformed/array-input"
            )
        _check_meta(spec.meta, f"input {index}", where)
    put = [item for change in program.container_changes for item in change.items if item is not None]
    for index in _arrays([program.output_tree, *put], "output", where):
        _check_meta(program.outputs[index], f"output {index}", where)


def _arrays(trees: Iterable[Tree], subject: str, where: Place) -> list[int]:
    """Return the indices of the leaves that are arrays, in order; refuse one that is also the index of another leaf."""
    trees = list(trees)
    arrays = arrays_in(trees)
    found = [leaf for tree in trees for _, leaf in leaves(tree) if isinstance(leaf, Leaf) and leaf.index in arrays]
    for leaf in found:
        if not leaf.array:
            raise where.invalid(
                f"{subject} {leaf.index} is an array in one place, and none in another",
                "structure-malformed/array-mixed",
            )
    return sorted(arrays)


def _check_meta(meta: TensorMeta | None, subject: str, where: Place) -> None:
    if meta is None or meta.dtype not in _DTYPES:
        raise where.invalid(f"{subject} is an array, and NumPy has no such values", "structure-malformed/array-dtype")


def check_container_changes(program: Program, where: Place) -> None:
    """Refuse changes of containers that no call passes, or that such a container cannot take."""
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
