"""Rules of nested values: the containers, keys and constants of arguments, results and contexts."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from aotexport_runtime.errors import Place
from aotexport_runtime.schema.bounded import INT64_MAX, ClassName, Hexadecimal, bounds_of, is_identifier
from aotexport_runtime.schema.trees import (
    Bytes,
    Constant,
    Instance,
    Key,
    Leaf,
    Mapping,
    NamedFields,
    NumpyNumber,
    PythonValue,
    Range,
    Sequence,
    Tree,
)
from aotexport_runtime.schema.values import FloatArgument, SliceArgument
from aotexport_runtime.validate.arguments import check_constant
from aotexport_runtime.validate.bounds import check_form
from aotexport_runtime.values.trees import SETS


def check_tree(tree: Tree, count: int, where: Place, *, is_context: bool = False) -> None:
    """Refuse a malformed tree of `count` inputs or outputs, or of a context, with objects of the caller's classes."""
    if isinstance(tree, Leaf):
        if not 0 <= tree.index < count:
            raise where.invalid(f"leaf {tree.index} of a tree is out of range", "index-range/leaf")
    elif isinstance(tree, Constant):
        if isinstance(tree.value, PythonValue):
            _check_python_value(tree.value, where)
        else:
            check_constant(tree.value, f"a constant of a {'context' if is_context else 'tree'}", where)
    else:
        _check_container(tree, where)
        if is_context:
            _check_context(tree, where)
        elif isinstance(tree, Instance):
            message = f"an object of `{tree.type[:80]}` is no input or output"
            raise where.invalid(message, "structure-malformed/instance")
        for item in tree.items:
            check_tree(item, count, where, is_context=is_context)


def _check_container(tree: Sequence | Mapping | NamedFields | Instance, where: Place) -> None:
    if isinstance(tree, Sequence):
        _check_sequence(tree, where)
        return
    names = tree.keys if isinstance(tree, Mapping) else tree.fields
    if isinstance(tree, Mapping):
        check_keys(tree.keys, where)
    if len(names) != len(tree.items):
        raise where.invalid(f"{len(names)} names for {len(tree.items)} items of a tree", "structure-malformed/names")
    if len(set(names)) != len(names):
        raise where.invalid("a tree has a name twice", "name-twice/tree")
    if isinstance(tree, Mapping) and tree.factory is not None and tree.type != "default_dict":
        message = "a dict of a tree makes missing values, and is no `defaultdict`"
        raise where.invalid(message, "structure-malformed/factory")
    if isinstance(tree, NamedFields):
        _check_identifier(tree.name, "__", where)
        for field in tree.fields:
            # Named tuples keep names with an underscore for themselves.
            _check_identifier(field, "_" if tree.type == "namedtuple" else "__", where)


def _check_sequence(tree: Sequence, where: Place) -> None:
    constants = [item.value for item in tree.items if isinstance(item, Constant)]
    others = [item for item in tree.items if not isinstance(item, Constant)]
    if tree.type in SETS and (others or any(isinstance(value, list | SliceArgument) for value in constants)):
        raise where.invalid("a set of a tree holds something else than plain constants", "structure-malformed/set")
    if tree.type == "size" and not (all(isinstance(each, Leaf) for each in others) and all(map(_is_size, constants))):
        raise where.invalid("a size of a tree holds something else than integers", "structure-malformed/size")
    if tree.max_items is not None and (tree.type != "deque" or not len(tree.items) <= tree.max_items <= INT64_MAX):
        message = "a sequence of a tree has more items than it may keep, or is no deque"
        raise where.invalid(message, "structure-malformed/max-items")
    if tree.name is not None:
        _check_identifier(tree.name, "__", where)
        if tree.type not in ("list", "tuple"):
            message = "a sequence of a tree is of a class of its own, and no list or tuple"
            raise where.invalid(message, "structure-malformed/sequence-name")


def _is_size(value: Any) -> bool:
    return type(value) is int and abs(value) <= INT64_MAX


def _check_identifier(name: str, reserved: str, where: Place) -> None:
    """Refuse a name that is no plain attribute: Python's named tuples and dataclasses generate code with it."""
    if not is_identifier(name) or name.startswith(reserved):
        raise where.invalid(f"the name {name[:80]!r} in a tree is no plain identifier", "name-malformed/tree-name")


def _check_context(tree: Sequence | Mapping | NamedFields | Instance, where: Place) -> None:
    if isinstance(tree, Instance):
        check_form(tree.type, ClassName, "`Instance.type`", "name-malformed/instance", where)
        if tree.form == "enum" and tree.fields != ("name",):
            raise where.invalid(f"a member of `{tree.type}` has no name", "name-malformed/enum")
        if not all(name.isidentifier() for name in tree.fields):
            raise where.invalid(f"a field of `{tree.type}` has a malformed name", "name-malformed/field")
    elif tree.type not in ("list", "tuple", "size", "dict"):
        raise where.invalid("a context holds what no context has", "structure-malformed/context")


def check_keys(keys: Iterable[Key], where: Place) -> None:
    """Refuse malformed keys of a dict."""
    for key in keys:
        for part in key if isinstance(key, tuple) else (key,):
            _check_python_value(part, where)


def _check_python_value(value: Any, where: Place) -> None:
    if isinstance(value, Bytes) and not bounds_of(Hexadecimal).takes(value.hex):
        raise where.invalid("the bytes of a tree are no pairs of hexadecimal digits", "structure-malformed/bytes")
    if isinstance(value, Range) and value.step == 0:
        raise where.invalid("a range of a tree has the step 0", "structure-malformed/range")
    if isinstance(value, NumpyNumber) and not _is_of_type(value):
        raise where.invalid(f"a NumPy number of a tree is no {value.dtype}", "structure-malformed/numpy-number")


def _is_of_type(number: NumpyNumber) -> bool:
    value = number.value
    if number.dtype == "bool":
        return isinstance(value, bool)
    if number.dtype.startswith("float"):
        return isinstance(value, float | FloatArgument)
    limits = np.iinfo(number.dtype)
    return type(value) is int and limits.min <= value <= limits.max
