"""Rules of nested values (containers, keys and constants of arguments, results and contexts) and tensor subclasses."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from aotexport_runtime.errors import Place
from aotexport_runtime.schema import trees
from aotexport_runtime.schema.bounded import INT64_MAX, ClassName, Hexadecimal, bounds_of, is_identifier
from aotexport_runtime.schema.graph import DTENSOR, Subclass
from aotexport_runtime.schema.manifest import StateTensor
from aotexport_runtime.schema.program import ArgumentInput, InputSpec, Program, SizeInput, StateInput
from aotexport_runtime.schema.trees import Constant, Mapping, Sequence, Tree
from aotexport_runtime.schema.values import FloatArgument, SliceArgument, StringArgument, TensorMeta
from aotexport_runtime.validate.arguments import check_constant, check_form, check_ranks
from aotexport_runtime.validate.types import category_of
from aotexport_runtime.values.sizes import check_size
from aotexport_runtime.values.trees import SETS

if TYPE_CHECKING:
    from aotexport_runtime.schema.vectors import VectorInput


def check_tree(tree: trees.Tree, count: int, where: Place, *, is_context: bool = False) -> None:
    """Refuse a malformed tree of `count` inputs or outputs, or of a context, with objects of the caller's classes."""
    if isinstance(tree, trees.Leaf):
        where.require(0 <= tree.index < count, f"leaf {tree.index} of a tree is out of range", "index-range/leaf")
    elif isinstance(tree, trees.Constant):
        if isinstance(tree.value, trees.PythonValue):
            _check_python_value(tree.value, where)
        else:
            check_constant(tree.value, f"a constant of a {'context' if is_context else 'tree'}", where)
    else:
        _check_container(tree, where)
        if is_context:
            _check_context(tree, where)
        elif isinstance(tree, trees.Instance):
            message = f"an object of `{tree.type[:80]}` is no input or output"
            raise where.invalid(message, "structure-malformed/instance")
        for item in tree.items:
            check_tree(item, count, where, is_context=is_context)


def _check_container(tree: trees.Sequence | trees.Mapping | trees.NamedFields | trees.Instance, where: Place) -> None:
    if isinstance(tree, trees.Sequence):
        _check_sequence(tree, where)
        return
    names = tree.keys if isinstance(tree, trees.Mapping) else tree.fields
    if isinstance(tree, trees.Mapping):
        check_keys(tree.keys, where)
    message = f"{len(names)} names for {len(tree.items)} items of a tree"
    where.require(len(names) == len(tree.items), message, "structure-malformed/names")
    where.require(len(set(names)) == len(names), "a tree has a name twice", "name-twice/tree")
    if isinstance(tree, trees.Mapping) and tree.factory is not None:
        message = "a dict of a tree makes missing values, and is no `defaultdict`"
        where.require(tree.type == "default_dict", message, "structure-malformed/factory")
    if isinstance(tree, trees.NamedFields):
        _check_identifier(tree.name, "__", where)
        for field in tree.fields:
            # Named tuples keep names with an underscore for themselves.
            _check_identifier(field, "_" if tree.type == "namedtuple" else "__", where)


def _check_sequence(tree: trees.Sequence, where: Place) -> None:
    constants = [item.value for item in tree.items if isinstance(item, trees.Constant)]
    others = [item for item in tree.items if not isinstance(item, trees.Constant)]
    if tree.type in SETS and (others or any(isinstance(value, list | SliceArgument) for value in constants)):
        raise where.invalid("a set of a tree holds something else than plain constants", "structure-malformed/set")
    if tree.type == "size":
        fits = all(isinstance(each, trees.Leaf) for each in others) and all(
            type(each) is int and abs(each) <= INT64_MAX for each in constants
        )
        where.require(fits, "a size of a tree holds something else than integers", "structure-malformed/size")
    if tree.max_items is not None and (tree.type != "deque" or not len(tree.items) <= tree.max_items <= INT64_MAX):
        message = "a sequence of a tree has more items than it may keep, or is no deque"
        raise where.invalid(message, "structure-malformed/max-items")
    if tree.name is not None:
        _check_identifier(tree.name, "__", where)
        message = "a sequence of a tree is of a class of its own, and no list or tuple"
        where.require(tree.type in ("list", "tuple"), message, "structure-malformed/sequence-name")


def _check_identifier(name: str, reserved: str, where: Place) -> None:
    """Refuse a name that is no plain attribute: Python's named tuples and dataclasses generate code with it."""
    fits = is_identifier(name) and not name.startswith(reserved)
    where.require(fits, f"the name {name[:80]!r} in a tree is no plain identifier", "name-malformed/tree-name")


def _check_context(tree: trees.Sequence | trees.Mapping | trees.NamedFields | trees.Instance, where: Place) -> None:
    if isinstance(tree, trees.Instance):
        check_form(tree.type, ClassName, "`Instance.type`", "name-malformed/instance", where)
        is_named = tree.form != "enum" or tree.fields == ("name",)
        where.require(is_named, f"a member of `{tree.type}` has no name", "name-malformed/enum")
        is_named = all(name.isidentifier() for name in tree.fields)
        where.require(is_named, f"a field of `{tree.type}` has a malformed name", "name-malformed/field")
    else:
        is_plain = tree.type in ("list", "tuple", "size", "dict")
        where.require(is_plain, "a context holds what no context has", "structure-malformed/context")


def check_keys(keys: Iterable[trees.Key], where: Place) -> None:
    """Refuse malformed keys of a dict."""
    for key in keys:
        for part in key if isinstance(key, tuple) else (key,):
            _check_python_value(part, where)


def _check_python_value(value: Any, where: Place) -> None:
    if isinstance(value, trees.Bytes) and not bounds_of(Hexadecimal).takes(value.hex):
        raise where.invalid("the bytes of a tree are no pairs of hexadecimal digits", "structure-malformed/bytes")
    if isinstance(value, trees.Range) and value.step == 0:
        raise where.invalid("a range of a tree has the step 0", "structure-malformed/range")
    if isinstance(value, trees.NumpyNumber) and not _is_of_type(value):
        raise where.invalid(f"a NumPy number of a tree is no {value.dtype}", "structure-malformed/numpy-number")


def _is_of_type(number: trees.NumpyNumber) -> bool:
    value = number.value
    if number.dtype == "bool":
        return isinstance(value, bool)
    if number.dtype.startswith("float"):
        return isinstance(value, float | FloatArgument)
    limits = np.iinfo(number.dtype)
    return type(value) is int and limits.min <= value <= limits.max


MAX_PARTS = 1000


def check_subclass(record: Subclass, symbols: set[str], where: Place) -> None:
    """Refuse a structure whose names, context, or sizes over these symbols are malformed."""
    is_named = all(name.isidentifier() for name in record.attributes)
    where.require(is_named, f"an inner tensor of `{record.type}` has a malformed name", "name-malformed/inner-tensor")
    check_ranks(record.shape, record.stride, f"`{record.type}`", where, "structure-malformed/subclass-ranks")
    for size in (*record.shape, *record.stride):
        check_size(size, symbols, where=where)
    check_tree(record.context, 0, where, is_context=True)
    if record.type == DTENSOR:
        _check_mesh(record.context, where)
    for inner in record.inner:
        if inner is not None:
            check_subclass(inner, symbols, where)
    count = count_parts(record)
    where.require(0 < count <= MAX_PARTS, f"`{record.type}` has {count} parts", "structure-malformed/subclass-parts")


def check_parts(spec: StateTensor | StateInput | ArgumentInput | VectorInput, symbols: set[str], where: Place) -> None:
    """Refuse a malformed structure of a tensor over these symbols, or parts or a layout that do not fit it."""
    record, subject = spec.subclass, subject_of(spec)
    tensor = spec if isinstance(spec, StateTensor) else getattr(spec, "meta", None)
    if record is not None:
        check_subclass(record, symbols, where)
    expected = 0 if record is None else count_parts(record)
    check = "vector-malformed/parts" if tensor is None else "structure-malformed/parts"
    where.require(len(spec.parts) == expected, f"{subject} has {len(spec.parts)} parts, not {expected}", check)
    if record is not None and tensor is not None and (record.shape, record.stride) != (tensor.shape, tensor.stride):
        raise where.invalid(f"{subject} has another shape than its structure", "structure-malformed/subclass-layout")


def check_differentiable(tensor: TensorMeta | StateTensor, subject: str, where: Place) -> None:
    """Refuse a tensor without gradients that is said to require some."""
    fits = not tensor.requires_grad or category_of(tensor.dtype) in ("float", "complex")
    where.require(fits, f"{subject} is {tensor.dtype} and cannot require grad", "structure-malformed/requires-grad")


def subject_of(spec: StateTensor | StateInput | ArgumentInput | VectorInput) -> str:
    """Return how errors name a tensor."""
    if isinstance(spec, StateTensor | StateInput):
        return f"{'state' if isinstance(spec, StateTensor) else 'input'} {spec.name[:80]!r}"
    return f"argument {spec.path!r}"


_PLACEMENT = re.compile(r"replicate|shard:[0-9]+|partial:[a-z]+")


def is_placement(argument: object) -> bool:
    """Return whether a constant says how a distributed tensor is placed along an axis of its mesh (7.12)."""
    return isinstance(argument, StringArgument) and _PLACEMENT.fullmatch(argument.value) is not None


def _check_mesh(context: Tree, where: Place) -> None:
    """Refuse the context of a distributed tensor that does not tell its mesh and placements."""
    items = dict(zip(context.keys, context.items, strict=True)) if isinstance(context, Mapping) else {}
    sizes, placements = _constants(items.get("mesh")), _constants(items.get("placements"))
    names, device = items.get("names"), items.get("device_type")
    fits = (
        items.keys() == {"device_type", "mesh", "names", "placements"}
        and sizes == [1] * len(placements)
        and all(map(is_placement, placements))
        and (names == Constant(value=None) or all(isinstance(name, StringArgument) for name in _constants(names)))
        and isinstance(device, Constant)
        and isinstance(device.value, StringArgument)
    )
    where.require(fits, "the context of a distributed tensor is malformed", "structure-malformed/mesh")


def _constants(tree: Tree | None) -> list[object]:
    """Return the constants in a sequence; of what is none, a placeholder that no rule takes."""
    if not isinstance(tree, Sequence):
        return [tree]
    return [item.value if isinstance(item, Constant) else item for item in tree.items]


def taken_apart(program: Program) -> Program:
    """Return a program whose inputs are plain: each tensor subclass is replaced by its parts."""
    inputs: list[InputSpec] = []
    for spec in program.inputs:
        if isinstance(spec, SizeInput) or spec.subclass is None:
            inputs.append(spec)
        else:
            inputs += [msgspec.structs.replace(spec, meta=part, subclass=None, parts=()) for part in spec.parts]
    return msgspec.structs.replace(program, inputs=tuple(inputs))


def count_parts(record: Subclass) -> int:
    """Return how many plain tensors a structure has."""
    return sum(1 if inner is None else count_parts(inner) for inner in record.inner)
