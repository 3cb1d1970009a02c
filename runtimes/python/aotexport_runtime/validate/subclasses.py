"""Rules of the structures of tensor subclasses: their names are identifiers, their contexts data."""

from __future__ import annotations

import re

import msgspec

from aotexport_runtime.errors import Place
from aotexport_runtime.schema.bounded import MAX_AXES, ClassName
from aotexport_runtime.schema.manifest import StateTensor
from aotexport_runtime.schema.program import InputSpec, Program, SizeInput
from aotexport_runtime.schema.subclasses import Subclass
from aotexport_runtime.schema.trees import (
    Constant,
    Instance,
    Leaf,
    Mapping,
    NamedFields,
    PythonValue,
    Sequence,
    Tree,
)
from aotexport_runtime.schema.values import StringArgument, TensorMeta
from aotexport_runtime.validate.arguments import check_constant
from aotexport_runtime.validate.bounds import check_form
from aotexport_runtime.values.meshes import DTENSOR
from aotexport_runtime.values.python_values import check_python_value
from aotexport_runtime.values.sizes import check_size
from aotexport_runtime.values.trees import check_tree

MAX_PARTS = 1000


def check_subclass(record: Subclass, symbols: set[str], where: Place) -> None:
    """Refuse a structure whose names, sizes or context are malformed.

    Args:
        record: the structure.
        symbols: symbols that its sizes may refer to.
        where: for errors.

    Raises:
        BundleInvalid: names the fault.
    """
    if not all(name.isidentifier() for name in record.attributes):
        raise where.invalid(f"an inner tensor of `{record.type}` has a malformed name", "name-malformed/inner-tensor")
    if len(record.shape) != len(record.stride) or len(record.shape) > MAX_AXES:
        raise where.invalid(
            f"`{record.type}` has {len(record.shape)} sizes, {len(record.stride)} strides",
            "structure-malformed/subclass-ranks",
        )
    for size in (*record.shape, *record.stride):
        check_size(size, symbols, where=where)
    check_tree(record.context, 0, where=where)
    _check_context(record.context, where)
    if record.type == DTENSOR:
        _check_mesh(record.context, where)
    for inner in record.inner:
        if inner is not None:
            check_subclass(inner, symbols, where)
    if not 0 < count_parts(record) <= MAX_PARTS:
        raise where.invalid(f"`{record.type}` has {count_parts(record)} parts", "structure-malformed/subclass-parts")


def check_parts(
    record: Subclass | None,
    parts: int,
    subject: str,
    symbols: set[str],
    where: Place,
    check: str = "structure-malformed/parts",
) -> None:
    """Refuse a malformed structure of a tensor, or another number of parts than it has; None: of a plain tensor.

    Raises:
        BundleInvalid: names `subject`.
    """
    if record is not None:
        check_subclass(record, symbols, where)
    expected = 0 if record is None else count_parts(record)
    if parts != expected:
        raise where.invalid(f"{subject} has {parts} parts, not {expected}", check)


def check_layout(record: Subclass | None, tensor: TensorMeta | StateTensor, subject: str, where: Place) -> None:
    """Refuse a structure of another shape or stride than its tensor.

    Raises:
        BundleInvalid: names `subject`.
    """
    if record is not None and (record.shape, record.stride) != (tensor.shape, tensor.stride):
        raise where.invalid(f"{subject} has another shape than its structure", "structure-malformed/subclass-layout")


_PLACEMENT = re.compile(r"replicate|shard:[0-9]+|partial:[a-z]+")


def is_placement(argument: object) -> bool:
    """Return whether a constant says how a distributed tensor is placed along an axis of its mesh (7.12)."""
    return isinstance(argument, StringArgument) and _PLACEMENT.fullmatch(argument.value) is not None


def _check_mesh(context: Tree, where: Place) -> None:
    """Refuse the context of a distributed tensor that does not tell its mesh and placements."""
    items = dict(zip(context.keys, context.items, strict=True)) if isinstance(context, Mapping) else {}
    sizes, placements = _constants(items.get("mesh")), _constants(items.get("placements"))
    names, device = items.get("names"), items.get("device_type")
    if not (
        items.keys() == {"device_type", "mesh", "names", "placements"}
        and sizes == [1] * len(placements)
        and all(map(is_placement, placements))
        and (names == Constant(value=None) or all(isinstance(name, StringArgument) for name in _constants(names)))
        and isinstance(device, Constant)
        and isinstance(device.value, StringArgument)
    ):
        raise where.invalid("the context of a distributed tensor is malformed", "structure-malformed/mesh")


def _constants(tree: Tree | None) -> list[object]:
    """Return the constants in a sequence; of what is none, a placeholder that no rule takes."""
    if not isinstance(tree, Sequence):
        return [tree]
    return [item.value if isinstance(item, Constant) else item for item in tree.items]


def _check_context(tree: Tree, where: Place) -> None:
    is_unknown = (isinstance(tree, Sequence) and tree.type not in ("list", "tuple", "size")) or (
        isinstance(tree, Mapping) and tree.type != "dict"
    )
    if is_unknown or isinstance(tree, Leaf | NamedFields):
        raise where.invalid("a context holds what no context has", "structure-malformed/context")
    if isinstance(tree, Constant):
        if isinstance(tree.value, PythonValue):
            check_python_value(tree.value, where)
        else:
            check_constant(tree.value, "a constant of a context", where)
        return
    if isinstance(tree, Instance):
        check_form(tree.type, ClassName, "`Instance.type`", "name-malformed/instance", where)
        if tree.form == "enum" and tree.fields != ("name",):
            raise where.invalid(f"a member of `{tree.type}` has no name", "name-malformed/enum")
        if not all(name.isidentifier() for name in tree.fields):
            raise where.invalid(f"a field of `{tree.type}` has a malformed name", "name-malformed/field")
    for item in tree.items:
        _check_context(item, where)


def check_plain(tree: Tree, where: Place) -> None:
    """Refuse a tree of inputs or outputs with an object that only contexts have.

    Raises:
        BundleInvalid: names its class.
    """
    if isinstance(tree, Instance):
        raise where.invalid(f"an object of `{tree.type[:80]}` is no input or output", "structure-malformed/instance")
    if isinstance(tree, Sequence | Mapping | NamedFields):
        for item in tree.items:
            check_plain(item, where)


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
