"""Rules of a program: its inputs, outputs, symbols, signature and epilogues refer to each other within bounds."""

from __future__ import annotations

import msgspec

from aotexport_runtime.allowed.operators import VIEWS, aten_signatures
from aotexport_runtime.allowed.signatures import signature_of
from aotexport_runtime.errors import Place
from aotexport_runtime.schema.gradients import Gradients, Tangent
from aotexport_runtime.schema.manifest import Manifest, StateTensor
from aotexport_runtime.schema.program import (
    ArgumentInput,
    FreshOutput,
    FunctionalGraph,
    InputAlias,
    IntermediateAlias,
    OutputAlias,
    OutputSpec,
    Parameter,
    Program,
    SizeInput,
    StateInput,
    ViewStep,
)
from aotexport_runtime.schema.sizes import Dimension
from aotexport_runtime.schema.trees import Leaf, Mapping, Sequence
from aotexport_runtime.validate.arguments import check_constant, check_meta, introduced
from aotexport_runtime.validate.bounds import check_index
from aotexport_runtime.validate.containers import check_arrays, check_container_changes
from aotexport_runtime.validate.declared import check_declared
from aotexport_runtime.validate.graph import check_allowed
from aotexport_runtime.validate.subclasses import check_layout, check_parts, taken_apart
from aotexport_runtime.validate.types import takes
from aotexport_runtime.values.trees import leaves

_RANKS = {"channels_last": 4, "channels_last_3d": 5}


def check_program(program: Program, manifest: Manifest, *, name: str, where: Place) -> None:
    """Refuse a program whose indices, symbols or names are inconsistent.

    Args:
        program: as decoded.
        manifest: manifest of its bundle, checked.
        name: its name in the manifest.
        where: its file, for errors.
    """
    faults = where.found
    if program.name != name:
        where.at("name").refuse(f"it is of program {program.name[:80]!r}, not `{name}`", "program-malformed/name")
    check_declared(program, where, Manifest=manifest)
    if where.found > faults:
        return
    if not program.method.isidentifier() or program.method.startswith("__"):
        where.at("method").refuse(f"method {program.method[:80]!r} is no name of a method", "name-malformed/method")
    symbols = {dimension.symbol for dimension in program.dimensions}
    _check_inputs(program, manifest, symbols, where)
    for index, dimension in enumerate(program.dimensions):
        with where.at("dimensions", index) as here:
            _check_dimension(dimension, program, here)
    _check_parameters(program, where)
    for index, meta in enumerate(program.outputs):
        with where.at("outputs", index) as here:
            if meta is not None:
                check_meta(meta, symbols | introduced(meta), here)
    for check in (check_container_changes, check_arrays, _check_passed):
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
                subject = f"argument {spec.path!r}" if isinstance(spec, ArgumentInput) else f"input {spec.name[:80]!r}"
                check_parts(spec.subclass, len(spec.parts), subject, symbols, here)
                check_layout(spec.subclass, spec.meta, subject, here)
                for part in spec.parts:
                    check_meta(part, symbols, here)
                if spec.meta.requires_grad and not spec.meta.dtype.startswith(("float", "bfloat", "complex")):
                    raise here.invalid(
                        f"an input is {spec.meta.dtype} and cannot require grad", "structure-malformed/requires-grad"
                    )


def _check_state_input(spec: StateInput, stored: StateTensor | None, where: Place) -> None:
    if stored is None:
        raise where.invalid(f"input {spec.name[:80]!r} is not in the manifest's state", "reference-missing/state")
    if (spec.meta.dtype, spec.meta.shape) != (stored.dtype, stored.shape):
        raise where.invalid(f"input {spec.name[:80]!r} is not what the manifest's state says", "state-differs/tensor")
    metas = [(part.dtype, part.shape) for part in stored.parts]
    if spec.subclass != stored.subclass or [(part.dtype, part.shape) for part in spec.parts] != metas:
        raise where.invalid(
            f"input {spec.name[:80]!r} is not made of what the manifest's state says", "state-differs/parts"
        )


def _check_dimension(dimension: Dimension, program: Program, where: Place) -> None:
    spec = program.inputs[dimension.input_index]
    if isinstance(spec, StateInput):
        raise where.invalid("a dimension is read from a state tensor", "program-malformed/dimension-of-state")
    if not isinstance(spec, SizeInput):
        check_index(dimension.axis, len(spec.meta.shape), "axis of a dimension", "index-range/dimension-axis", where)
    if dimension.factor == 0:
        raise where.invalid("a dimension has factor 0", "program-malformed/dimension-factor")


def _check_parameters(program: Program, where: Place) -> None:
    with where.at("parameters") as here:
        for kind in ("var_positional", "var_keyword"):
            if sum(parameter.kind == kind for parameter in program.parameters) > 1:
                raise here.invalid(f"several parameters are {kind}", "program-malformed/parameter-kind")
    for index, parameter in enumerate(program.parameters):
        with where.at("parameters", index) as here:
            _check_parameter(parameter, here)


def _check_passed(program: Program, where: Place) -> None:
    """Refuse an argument that no parameter has."""
    trees = [parameter.tree for parameter in program.parameters if not parameter.optional]
    passed = {leaf.index for tree in trees for _, leaf in leaves(tree) if isinstance(leaf, Leaf)}
    for index, spec in enumerate(program.inputs):
        if not isinstance(spec, StateInput) and index not in passed:
            message = f"no parameter has the argument `{spec.path[:80]}`"
            where.at("inputs", index).refuse(message, "program-malformed/argument")


def _check_parameter(parameter: Parameter, where: Place) -> None:
    if parameter.kind == "var_positional" and not isinstance(parameter.tree, Sequence):
        raise where.invalid(
            f"parameter `{parameter.name[:80]}` is var_positional and no sequence", "program-malformed/var-positional"
        )
    if parameter.kind == "var_keyword" and not isinstance(parameter.tree, Mapping):
        raise where.invalid(
            f"parameter `{parameter.name[:80]}` is var_keyword and no mapping", "program-malformed/var-keyword"
        )


def _check_functional(program: Program, functional: FunctionalGraph, symbols: set[str], where: Place) -> None:
    faults, plain = where.found, taken_apart(program)
    check_declared(functional, where, Program=program, Plain=plain)
    if where.found > faults:
        return
    for index, output in enumerate(functional.outputs):
        with where.at("outputs", index) as here:
            _check_output(output, functional, here)
    if functional.gradients is not None:
        _check_gradients(functional.gradients, functional, plain, symbols, where.at("gradients"))


def _check_output(output: OutputSpec, functional: FunctionalGraph, where: Place) -> None:
    if isinstance(output, OutputAlias) and not isinstance(functional.outputs[output.output_index], FreshOutput):
        raise where.invalid(
            f"output_index of an output is {output.output_index}, which is no new tensor",
            "program-malformed/alias-of-alias",
        )
    if isinstance(output, InputAlias | IntermediateAlias | OutputAlias):
        for index, step in enumerate(output.steps or ()):
            _check_step(step, where.at("steps", index))


def _check_step(step: ViewStep, where: Place) -> None:
    check_allowed(step.op, set(), where=where)
    if step.op.removeprefix("aten::").partition(".")[0] not in VIEWS:
        raise where.invalid(f"operator `{step.op}` of a view step is no view", "operator-unlisted/view")
    for argument in step.args:
        check_constant(argument, "an argument of a view step", where)
    signature = signature_of(aten_signatures()[step.op.removeprefix("aten::")])
    for parameter, argument in zip(signature.positional[1:] if signature else (), step.args, strict=False):
        if not takes(parameter.type, argument, {}):
            raise where.invalid(
                f"argument `{parameter.name}` of operator `{step.op}` is no {parameter.type}", "argument-type/argument"
            )


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
            if isinstance(checked[check.index], SizeInput):
                raise here.invalid(
                    f"checked input is {check.index}, which is no tensor", "program-malformed/checked-number"
                )


def _check_tangent(tangent: Tangent, symbols: set[str], where: Place) -> None:
    check_meta(tangent.meta, symbols | introduced(tangent.meta), where)
    rank = len(tangent.meta.shape)
    if tangent.memory_format is not None:
        if tangent.memory_format == "preserve_format" or _RANKS.get(tangent.memory_format, rank) != rank:
            raise where.invalid(
                f"a tangent of {rank} axes has memory format {tangent.memory_format}",
                "program-malformed/tangent-format",
            )
        return
    if tangent.stride is None or len(tangent.stride) != rank:
        raise where.invalid(f"a tangent of {rank} axes has no layout", "program-malformed/tangent-stride")
    check_meta(msgspec.structs.replace(tangent.meta, stride=tangent.stride), symbols, where)
