"""Rules of the structures of tensor subclasses: their names are identifiers, their contexts data."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import msgspec

from aotexport_runtime.errors import Place
from aotexport_runtime.schema.manifest import StateTensor
from aotexport_runtime.schema.program import ArgumentInput, InputSpec, Program, SizeInput, StateInput
from aotexport_runtime.schema.subclasses import DTENSOR, Subclass
from aotexport_runtime.schema.trees import Constant, Mapping, Sequence, Tree
from aotexport_runtime.schema.values import StringArgument, TensorMeta
from aotexport_runtime.validate.bounds import check_ranks
from aotexport_runtime.validate.trees import check_tree
from aotexport_runtime.validate.types import category_of
from aotexport_runtime.values.sizes import check_size

if TYPE_CHECKING:
    from aotexport_runtime.schema.vectors import VectorInput

MAX_PARTS = 1000


def check_subclass(record: Subclass, symbols: set[str], where: Place) -> None:
    """Refuse a structure whose names, context, or sizes over these symbols are malformed."""
    if not all(name.isidentifier() for name in record.attributes):
        raise where.invalid(f"an inner tensor of `{record.type}` has a malformed name", "name-malformed/inner-tensor")
    check_ranks(record.shape, record.stride, f"`{record.type}`", where, "structure-malformed/subclass-ranks")
    for size in (*record.shape, *record.stride):
        check_size(size, symbols, where=where)
    check_tree(record.context, 0, where, is_context=True)
    if record.type == DTENSOR:
        _check_mesh(record.context, where)
    for inner in record.inner:
        if inner is not None:
            check_subclass(inner, symbols, where)
    if not 0 < count_parts(record) <= MAX_PARTS:
        raise where.invalid(f"`{record.type}` has {count_parts(record)} parts", "structure-malformed/subclass-parts")


def check_parts(spec: StateTensor | StateInput | ArgumentInput | VectorInput, symbols: set[str], where: Place) -> None:
    """Refuse a malformed structure of a tensor over these symbols, or parts or a layout that do not fit it."""
    record, subject = spec.subclass, subject_of(spec)
    tensor = spec if isinstance(spec, StateTensor) else getattr(spec, "meta", None)
    if record is not None:
        check_subclass(record, symbols, where)
    expected = 0 if record is None else count_parts(record)
    if len(spec.parts) != expected:
        check = "vector-malformed/parts" if tensor is None else "structure-malformed/parts"
        raise where.invalid(f"{subject} has {len(spec.parts)} parts, not {expected}", check)
    if record is not None and tensor is not None and (record.shape, record.stride) != (tensor.shape, tensor.stride):
        raise where.invalid(f"{subject} has another shape than its structure", "structure-malformed/subclass-layout")


def check_differentiable(tensor: TensorMeta | StateTensor, subject: str, where: Place) -> None:
    """Refuse a tensor without gradients that is said to require some."""
    if tensor.requires_grad and category_of(tensor.dtype) not in ("float", "complex"):
        message = f"{subject} is {tensor.dtype} and cannot require grad"
        raise where.invalid(message, "structure-malformed/requires-grad")


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
