"""Rules of a program: its inputs, outputs, symbols, signature and epilogues refer to each other within bounds."""

from __future__ import annotations

from collections.abc import Iterator
from typing import get_args

import msgspec

from aotexport_runtime.allowed.operators import VIEWS, aten_signatures
from aotexport_runtime.allowed.signatures import signature_of
from aotexport_runtime.errors import Place
from aotexport_runtime.schema.gradients import Gradients, Tangent
from aotexport_runtime.schema.manifest import Manifest, StateTensor
from aotexport_runtime.schema.program import (
    Alias,
    ArgumentInput,
    ContainerChange,
    FreshOutput,
    FunctionalGraph,
    OutputAlias,
    OutputSpec,
    Program,
    SizeInput,
    StateInput,
    ViewStep,
)
from aotexport_runtime.schema.sizes import Dimension
from aotexport_runtime.schema.trees import Constant, Leaf, Mapping, NamedFields, NumpyType, Sequence, Tree
from aotexport_runtime.validate.arguments import check_constant, check_index, check_meta, introduced
from aotexport_runtime.validate.declared import check_declared
from aotexport_runtime.validate.graph import check_allowed
from aotexport_runtime.validate.trees import check_differentiable, check_keys, check_parts, taken_apart
from aotexport_runtime.validate.types import takes
from aotexport_runtime.values.trees import arrays_in, leaves, steps

_RANKS = {"channels_last": 4, "channels_last_3d": 5}
_ARRAY_DTYPES = frozenset((*get_args(NumpyType), "complex64", "complex128"))
"""Element types that torch and NumPy both have."""


def check_program(program: Program, manifest: Manifest, *, name: str, where: Place) -> None:
    """Refuse a program whose indices, symbols or names are inconsistent, or not those of a checked manifest."""
    faults = where.found
    if program.name != name:
        where.at("name").refuse(f"it is of program {program.name[:80]!r}, not `{name}`", "program-malformed/name")
    if not check_declared(program, where, Manifest=manifest) or where.found > faults:
        return
    if not program.method.isidentifier() or program.method.startswith("__"):
        where.at("method").refuse(f"method {program.method[:80]!r} is no name of a method", "name-malformed/method")
    symbols = {dimension.symbol for dimension in program.dimensions}
    _check_inputs(program, manifest, symbols, where)
    for index, dimension in enumerate(program.dimensions):
        with where.at("dimensions", index) as here:
            _check_dimension(dimension, program, here)
    _check_parameters(program, where.at("parameters"))
    for index, meta in enumerate(program.outputs):
        with where.at("outputs", index) as here:
            if meta is not None:
                check_meta(meta, symbols | introduced(meta), here)
    for check in (_check_container_changes, _check_arrays, _check_passed):
        with where:
            if where.found == faults:
                check(program, where)
    if program.functional is not None and where.found == faults:
        _check_functional(program, program.functional, symbols, where.at("functional"))


def _check_inputs(program: Program, manifest: Manifest, symbols: set[str], where: Place) -> None:
    state = {name: tensor for tensor in manifest.state for name in (tensor.name, *tensor.tied)}
    for index, spec in enumerate(program.inputs):
        with where.at("inputs", index) as here:
            if isinstance(spec, StateInput):
                _check_state_input(spec, state.get(spec.name), here)
            if not isinstance(spec, SizeInput):
                check_meta(spec.meta, symbols, here)
                check_parts(spec, symbols, here)
                for part in spec.parts:
                    check_meta(part, symbols, here)
                check_differentiable(spec.meta, "an input", here)


def _check_state_input(spec: StateInput, stored: StateTensor | None, where: Place) -> None:
    subject = f"input {spec.name[:80]!r}"
    if stored is None:
        raise where.invalid(f"{subject} is not in the manifest's state", "reference-missing/state")
    is_same = (spec.meta.dtype, spec.meta.shape) == (stored.dtype, stored.shape)
    where.require(is_same, f"{subject} is not what the manifest's state says", "state-differs/tensor")
    metas, own = ([(part.dtype, part.shape) for part in each.parts] for each in (stored, spec))
    is_same = spec.subclass == stored.subclass and own == metas
    where.require(is_same, f"{subject} is not made of what the manifest's state says", "state-differs/parts")


def _check_dimension(dimension: Dimension, program: Program, where: Place) -> None:
    spec = program.inputs[dimension.input_index]
    if isinstance(spec, StateInput):
        raise where.invalid("a dimension is read from a state tensor", "program-malformed/dimension-of-state")
    if not isinstance(spec, SizeInput):
        check_index(dimension.axis, len(spec.meta.shape), "axis of a dimension", "index-range/dimension-axis", where)
    where.require(dimension.factor != 0, "a dimension has factor 0", "program-malformed/dimension-factor")


def _check_parameters(program: Program, where: Place) -> None:
    kinds = [parameter.kind for parameter in program.parameters]
    for kind in ("var_positional", "var_keyword"):
        if kinds.count(kind) > 1:
            where.refuse(f"several parameters are {kind}", "program-malformed/parameter-kind")
    for index, parameter in enumerate(program.parameters):
        subject, here = f"parameter `{parameter.name[:80]}`", where.at(index)
        if parameter.kind == "var_positional" and not isinstance(parameter.tree, Sequence):
            here.refuse(f"{subject} is var_positional and no sequence", "program-malformed/var-positional")
        if parameter.kind == "var_keyword" and not isinstance(parameter.tree, Mapping):
            here.refuse(f"{subject} is var_keyword and no mapping", "program-malformed/var-keyword")


def _check_passed(program: Program, where: Place) -> None:
    """Refuse an argument that no parameter has."""
    trees = [parameter.tree for parameter in program.parameters if not parameter.optional]
    passed = {leaf.index for tree in trees for _, leaf in leaves(tree) if isinstance(leaf, Leaf)}
    for index, spec in enumerate(program.inputs):
        if not isinstance(spec, StateInput) and index not in passed:
            message = f"no parameter has the argument `{spec.path[:80]}`"
            where.at("inputs", index).refuse(message, "program-malformed/argument")


def _check_arrays(program: Program, where: Place) -> None:
    """Refuse NumPy arrays that no call can pass or return."""
    for index in _arrays([parameter.tree for parameter in program.parameters], "input", where):
        spec = program.inputs[index]
        if not isinstance(spec, ArgumentInput) or spec.subclass is not None or spec.meta.requires_grad:
            message = f"input {index} is an array, and no plain argument without gradients"
            raise where.invalid(message, "structure-malformed/array-input")
        _check_array(spec.meta.dtype, f"input {index}", where)
    put = [item for change in program.container_changes for item in change.items if item is not None]
    for index in _arrays([program.output_tree, *put], "output", where):
        meta = program.outputs[index]
        _check_array(None if meta is None else meta.dtype, f"output {index}", where)


def _arrays(trees: list[Tree], subject: str, where: Place) -> list[int]:
    """Return the indices of the leaves that are arrays, in order; refuse one that is also the index of another leaf."""
    arrays = arrays_in(trees)
    for leaf in (leaf for tree in trees for _, leaf in leaves(tree) if isinstance(leaf, Leaf)):
        message = f"{subject} {leaf.index} is an array in one place, and none in another"
        where.require(leaf.array or leaf.index not in arrays, message, "structure-malformed/array-mixed")
    return sorted(arrays)


def _check_array(dtype: str | None, subject: str, where: Place) -> None:
    message = f"{subject} is an array, and NumPy has no such values"
    where.require(dtype in _ARRAY_DTYPES, message, "structure-malformed/array-dtype")


def _check_container_changes(program: Program, where: Place) -> None:
    """Refuse changes of containers that no call passes, or that such a container cannot take."""
    passed = {path: tree for p in program.parameters if not p.optional for path, tree in _containers(p.tree, p.name)}
    for index, change in enumerate(program.container_changes):
        with where.at("container_changes", index) as here:
            _check_change(change, passed.get(change.path), here)


def _check_change(change: ContainerChange, tree: Tree | None, where: Place) -> None:
    subject = f"changed container {change.path[:80]!r}"
    if tree is None:
        raise where.invalid(f"every call must pass the {subject}", "reference-missing/container")
    check_keys(change.keys, where)
    fits = len(set(change.keys)) == len(change.keys) == len(change.items)
    where.require(fits, f"the keys of the {subject} do not fit", "program-malformed/container-keys")
    message = f"the container {change.path[:80]!r} cannot be changed so"
    where.require(_takes(tree, change), message, "program-malformed/container-change")


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


def _check_functional(program: Program, functional: FunctionalGraph, symbols: set[str], where: Place) -> None:
    plain = taken_apart(program)
    if not check_declared(functional, where, Program=program, Plain=plain):
        return
    for index, output in enumerate(functional.outputs):
        with where.at("outputs", index) as here:
            _check_output(output, functional, here)
    if functional.gradients is not None:
        _check_gradients(functional.gradients, functional, plain, symbols, where.at("gradients"))


def _check_output(output: OutputSpec, functional: FunctionalGraph, where: Place) -> None:
    if isinstance(output, OutputAlias) and not isinstance(functional.outputs[output.output_index], FreshOutput):
        message = f"output_index of an output is {output.output_index}, which is no new tensor"
        raise where.invalid(message, "program-malformed/alias-of-alias")
    if isinstance(output, Alias):
        for index, step in enumerate(output.steps or ()):
            _check_step(step, where.at("steps", index))


def _check_step(step: ViewStep, where: Place) -> None:
    check_allowed(step.op, set(), where=where)
    is_view = step.op.removeprefix("aten::").partition(".")[0] in VIEWS
    where.require(is_view, f"operator `{step.op}` of a view step is no view", "operator-unlisted/view")
    if step.item is not None:
        raise where.invalid("`item` of a view step is set: no view has several results", "program-malformed/step-item")
    for argument in step.args:
        check_constant(argument, "an argument of a view step", where)
    signature = signature_of(aten_signatures()[step.op.removeprefix("aten::")])
    for parameter, argument in zip(signature.positional[1:] if signature else (), step.args, strict=False):
        message = f"argument `{parameter.name}` of operator `{step.op}` is no {parameter.type}"
        where.require(takes(parameter.type, argument, {}), message, "argument-type/argument")


def _check_gradients(
    gradients: Gradients, functional: FunctionalGraph, program: Program, symbols: set[str], where: Place
) -> None:
    for index, gradient in enumerate(gradients.of_inputs):
        if gradient is not None and isinstance(program.inputs[index], SizeInput):
            message = f"input of a gradient is {index}, which is no tensor"
            where.at("of_inputs", index).refuse(message, "program-malformed/gradient-of-number")
    limits = {"mutation": len(functional.mutations), "output": len(program.outputs)}
    limits["intermediate_base"] = functional.intermediate_bases
    for index, tangent in enumerate(gradients.tangents):
        with where.at("tangents", index) as here:
            check_index(tangent.index, limits[tangent.of], "index of a tangent", "index-range/tangent", here)
            _check_tangent(tangent, symbols, here)
    for index, check in enumerate(gradients.checks):
        with where.at("checks", index) as here:
            checked = program.inputs if check.of == "input" else program.outputs
            check_index(check.index, len(checked), f"checked {check.of}", "index-range/checked", here)
            is_tensor = not isinstance(checked[check.index], SizeInput)
            message = f"checked input is {check.index}, which is no tensor"
            here.require(is_tensor, message, "program-malformed/checked-number")


def _check_tangent(tangent: Tangent, symbols: set[str], where: Place) -> None:
    check_meta(tangent.meta, symbols | introduced(tangent.meta), where)
    rank, layout = len(tangent.meta.shape), tangent.memory_format
    if layout is not None:
        fits = layout != "preserve_format" and _RANKS.get(layout, rank) == rank
        message = f"a tangent of {rank} axes has memory format {layout}"
        where.require(fits, message, "program-malformed/tangent-format")
    elif tangent.stride is None or len(tangent.stride) != rank:
        raise where.invalid(f"a tangent of {rank} axes has no layout", "program-malformed/tangent-stride")
    else:
        check_meta(msgspec.structs.replace(tangent.meta, stride=tangent.stride), symbols, where)
