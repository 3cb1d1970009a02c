"""Rules of a program: its inputs, outputs, symbols, signature and epilogues refer to each other within bounds."""

from __future__ import annotations

import msgspec

from aotexport_runtime.allowed.operators import VIEWS
from aotexport_runtime.errors import BundleInvalid, Place
from aotexport_runtime.schema.gradients import Gradients, Tangent, VersionCheck
from aotexport_runtime.schema.manifest import Manifest, StateTensor
from aotexport_runtime.schema.program import (
    ArgumentInput,
    FreshOutput,
    FunctionalGraph,
    InputAlias,
    InputItself,
    IntermediateAlias,
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
from aotexport_runtime.validate.arrays import check_arrays
from aotexport_runtime.validate.bounds import MAX_NODES, check_index, check_plain_name, check_text, check_unique
from aotexport_runtime.validate.containers import check_container_changes, check_values
from aotexport_runtime.validate.graph import check_allowed
from aotexport_runtime.validate.subclasses import check_subclass, count_parts, taken_apart
from aotexport_runtime.values.sizes import INT64_MAX, check_size
from aotexport_runtime.values.trees import is_identifier, leaves

_RANKS = {"channels_last": 4, "channels_last_3d": 5}


def check_program(program: Program, manifest: Manifest, *, name: str, where: str) -> None:
    """Refuse a program whose indices, symbols or names are inconsistent.

    Args:
        program: as decoded.
        manifest: manifest of its bundle, checked.
        name: its name in the manifest.
        where: file name, for errors.

    Raises:
        BundleInvalid: names the fault.
    """
    where = Place(where)
    faults = where.found
    with where.at("name") as here:
        _check_name(program, name, here)
    with where.at("method") as here:
        _check_method(program, here)
    with where.at("dimensions") as here:
        check_unique([dimension.symbol for dimension in program.dimensions], "symbol", here)
    symbols = {dimension.symbol for dimension in program.dimensions}
    _check_inputs(program, manifest, symbols, where)
    for index, dimension in enumerate(program.dimensions):
        with where.at("dimensions", index) as here:
            _check_dimension(dimension, program, here)
    for index, guard in enumerate(program.guards):
        with where.at("guards", index) as here:
            check_size(guard, symbols, where=here)
    _check_signature(program, where)
    with where.at("differentiated") as here:
        check_unique(list(program.differentiated), "differentiated input", here)
        for index in program.differentiated:
            _check_tensor_input(index, program, "differentiated input", here)
    for number, question in enumerate(program.questions):
        with where.at("questions", number, "inputs") as here:
            check_unique(list(question.inputs), "input of a question", here)
            for index in question.inputs:
                _check_tensor_input(index, program, "input of a question", here)
    for index, meta in enumerate(program.outputs):
        with where.at("outputs", index) as here:
            if meta is not None:
                check_meta(meta, symbols | introduced(meta), here)
    with where.at("output_tree") as here:
        check_values(program.output_tree, len(program.outputs), here)
    _check_rebinds(program, manifest, where)
    if where.found == faults:
        # These walk the trees, which are sound then.
        check_container_changes(program, where)
    with where:
        if where.found == faults:
            check_arrays(program, where)
    if where.found == faults:
        _check_passed(program, where)
    with where.at("forward", "file") as here:
        check_plain_name(program.forward.file, "graph file", here)
    if program.functional is not None and where.found == faults:
        _check_functional(taken_apart(program), program.functional, symbols, where.at("functional"))


def _check_name(program: Program, name: str, where: str) -> None:
    if program.name != name:
        raise BundleInvalid(
            f"it is of program {program.name[:80]!r}, not `{name}`", where=where, code="program-malformed"
        )


def _check_method(program: Program, where: str) -> None:
    check_text(program.method, "method", where)
    if not program.method.isidentifier() or program.method.startswith("__"):
        raise BundleInvalid(
            f"method {program.method[:80]!r} is no name of a method", where=where, code="name-malformed"
        )


def _check_inputs(program: Program, manifest: Manifest, symbols: set[str], where: Place) -> None:
    state = {name: tensor for tensor in manifest.state for name in (tensor.name, *tensor.tied)}
    for index, spec in enumerate(program.inputs):
        with where.at("inputs", index) as here:
            if isinstance(spec, StateInput):
                _check_state_input(spec, state.get(spec.name), here)
            else:
                check_text(spec.path, "path of an argument", here)
            if isinstance(spec, SizeInput):
                check_size(spec.symbol, symbols, where=here)
            else:
                check_meta(spec.meta, symbols, here)
                _check_parts(spec, symbols, here)
                if spec.meta.requires_grad and not spec.meta.dtype.startswith(("float", "bfloat", "complex")):
                    raise BundleInvalid(
                        f"an input is {spec.meta.dtype} and cannot require grad", where=here, code="structure-malformed"
                    )


def _check_parts(spec: ArgumentInput | StateInput, symbols: set[str], where: str) -> None:
    subject = f"argument {spec.path!r}" if isinstance(spec, ArgumentInput) else f"input {spec.name[:80]!r}"
    expected = 0
    if spec.subclass is not None:
        check_subclass(spec.subclass, symbols, where)
        expected = count_parts(spec.subclass)
        if (spec.subclass.shape, spec.subclass.stride) != (spec.meta.shape, spec.meta.stride):
            raise BundleInvalid(
                f"{subject} has another shape than its structure", where=where, code="structure-malformed"
            )
    if len(spec.parts) != expected:
        raise BundleInvalid(
            f"{subject} has {len(spec.parts)} parts, not {expected}", where=where, code="structure-malformed"
        )
    for part in spec.parts:
        check_meta(part, symbols, where)


def _check_state_input(spec: StateInput, stored: StateTensor | None, where: str) -> None:
    if stored is None:
        raise BundleInvalid(
            f"input {spec.name[:80]!r} is not in the manifest's state", where=where, code="reference-missing"
        )
    if (spec.meta.dtype, spec.meta.shape) != (stored.dtype, stored.shape):
        raise BundleInvalid(
            f"input {spec.name[:80]!r} is not what the manifest's state says", where=where, code="state-differs"
        )
    metas = [(part.dtype, part.shape) for part in stored.parts]
    if spec.subclass != stored.subclass or [(part.dtype, part.shape) for part in spec.parts] != metas:
        raise BundleInvalid(
            f"input {spec.name[:80]!r} is not made of what the manifest's state says", where=where, code="state-differs"
        )


def _check_dimension(dimension: Dimension, program: Program, where: str) -> None:
    check_text(dimension.name, "name of a dimension", where)
    check_index(dimension.input_index, len(program.inputs), "input_index of a dimension", where)
    spec = program.inputs[dimension.input_index]
    if isinstance(spec, StateInput):
        raise BundleInvalid("a dimension is read from a state tensor", where=where, code="program-malformed")
    if not isinstance(spec, SizeInput):
        check_index(dimension.axis, len(spec.meta.shape), "axis of a dimension", where)
    if dimension.factor == 0:
        raise BundleInvalid("a dimension has factor 0", where=where, code="program-malformed")
    numbers = (dimension.min or 0, dimension.max or 0, dimension.factor, dimension.offset)
    if any(abs(number) > INT64_MAX for number in numbers):
        raise BundleInvalid("a dimension has a number of more than 64 bits", where=where, code="number-limit")


def _check_signature(program: Program, where: Place) -> None:
    with where.at("parameters") as here:
        check_unique([parameter.name for parameter in program.parameters], "parameter", here)
        for kind in ("var_positional", "var_keyword"):
            if sum(parameter.kind == kind for parameter in program.parameters) > 1:
                raise BundleInvalid(f"several parameters are {kind}", where=here, code="program-malformed")
    for index, parameter in enumerate(program.parameters):
        with where.at("parameters", index) as here:
            _check_parameter(parameter, len(program.inputs), here)


def _check_passed(program: Program, where: Place) -> None:
    """Refuse an argument that no parameter has."""
    trees = [parameter.tree for parameter in program.parameters if not parameter.optional]
    passed = {leaf.index for tree in trees for _, leaf in leaves(tree) if isinstance(leaf, Leaf)}
    for index, spec in enumerate(program.inputs):
        if not isinstance(spec, StateInput) and index not in passed:
            with where.at("inputs", index) as here:
                raise BundleInvalid(
                    f"no parameter has the argument `{spec.path[:80]}`", where=here, code="program-malformed"
                )


def _check_parameter(parameter: Parameter, inputs: int, where: str) -> None:
    if not is_identifier(parameter.name):
        raise BundleInvalid(
            f"parameter {parameter.name[:80]!r} is not an identifier", where=where, code="name-malformed"
        )
    check_values(parameter.tree, inputs, where)
    if parameter.default is not None:
        check_values(parameter.default, 0, where)
    if parameter.kind == "var_positional" and not isinstance(parameter.tree, Sequence):
        raise BundleInvalid(
            f"parameter `{parameter.name[:80]}` is var_positional and no sequence",
            where=where,
            code="program-malformed",
        )
    if parameter.kind == "var_keyword" and not isinstance(parameter.tree, Mapping):
        raise BundleInvalid(
            f"parameter `{parameter.name[:80]}` is var_keyword and no mapping", where=where, code="program-malformed"
        )


def _check_rebinds(program: Program, manifest: Manifest, where: Place) -> None:
    first_names = {tensor.name for tensor in manifest.state}
    with where.at("rebinds") as here:
        check_unique([rebind.name for rebind in program.rebinds], "rebound state", here)
    for index, rebind in enumerate(program.rebinds):
        with where.at("rebinds", index) as here:
            if rebind.name not in first_names:
                raise BundleInvalid(
                    f"rebound state {rebind.name[:80]!r} is not in the manifest's state",
                    where=here.at("name"),
                    code="reference-missing",
                )
            place = here.at("output_index")
            check_index(rebind.output_index, len(program.outputs), "output_index of a rebind", place)
            if program.outputs[rebind.output_index] is None:
                raise BundleInvalid(
                    f"state {rebind.name[:80]!r} is rebound to a size", where=place, code="program-malformed"
                )


def _check_functional(program: Program, functional: FunctionalGraph, symbols: set[str], where: Place) -> None:
    with where.at("file") as here:
        check_plain_name(functional.file, "graph file", here)
    outputs = len(program.outputs)
    with where.at("outputs") as here:
        if len(functional.outputs) != outputs:
            raise BundleInvalid(
                f"{len(functional.outputs)} output kinds for {outputs} outputs", where=here, code="program-malformed"
            )
    with where.at("intermediate_bases") as here:
        check_index(functional.intermediate_bases, MAX_NODES, "number of intermediate bases", here)
    for index, guard in enumerate(functional.guards):
        with where.at("guards", index) as here:
            check_size(guard, symbols, where=here)
    _check_changes(program, functional, where)
    for index, output in enumerate(functional.outputs):
        with where.at("outputs", index) as here:
            _check_output(output, program, functional, here)
    if functional.gradients is not None:
        _check_gradients(functional.gradients, functional, program, symbols, where.at("gradients"))


def _check_changes(program: Program, functional: FunctionalGraph, where: Place) -> None:
    with where.at("mutations") as here:
        check_unique([mutation.input_index for mutation in functional.mutations], "mutation of input", here)
    for index, mutation in enumerate(functional.mutations):
        with where.at("mutations", index, "input_index") as here:
            _check_tensor_input(mutation.input_index, program, "input_index of a mutation", here)
    with where.at("version_rises") as here:
        check_unique([rise.input_index for rise in functional.version_rises], "version of input", here)
    for index, rise in enumerate(functional.version_rises):
        with where.at("version_rises", index) as here:
            _check_tensor_input(rise.input_index, program, "input_index of a version", here)
            check_index(rise.by, MAX_NODES, "rise of a version", here)


def _check_tensor_input(index: int, program: Program, subject: str, where: str) -> None:
    check_index(index, len(program.inputs), subject, where)
    if isinstance(program.inputs[index], SizeInput):
        raise BundleInvalid(f"{subject} is {index}, which is no tensor", where=where, code="program-malformed")


def _check_output(output: OutputSpec, program: Program, functional: FunctionalGraph, where: Place) -> None:
    if isinstance(output, FreshOutput):
        return
    if isinstance(output, InputItself | InputAlias):
        _check_tensor_input(output.input_index, program, "input_index of an output", where)
    elif isinstance(output, IntermediateAlias):
        check_index(output.base_index, functional.intermediate_bases, "base_index of an output", where)
    else:
        check_index(output.output_index, len(program.outputs), "output_index of an output", where)
        base = functional.outputs[output.output_index]
        if program.outputs[output.output_index] is None or not isinstance(base, FreshOutput):
            raise BundleInvalid(
                f"output_index of an output is {output.output_index}, which is no new tensor",
                where=where,
                code="program-malformed",
            )
    if not isinstance(output, InputItself):
        for index, step in enumerate(output.steps or ()):
            _check_step(step, where.at("steps", index))


def _check_step(step: ViewStep, where: str) -> None:
    check_allowed(step.op, set(), where=where)
    if step.op.removeprefix("aten::").partition(".")[0] not in VIEWS:
        raise BundleInvalid(f"operator `{step.op}` of a view step is no view", where=where, code="operator-unlisted")
    for argument in step.args:
        check_constant(argument, "an argument of a view step", where)
    if step.item is not None:
        check_index(step.item, INT64_MAX, "item of a view step", where)


def _check_gradients(
    gradients: Gradients, functional: FunctionalGraph, program: Program, symbols: set[str], where: Place
) -> None:
    with where.at("of_inputs") as here:
        if len(gradients.of_inputs) != len(program.inputs):
            raise BundleInvalid(
                f"{len(gradients.of_inputs)} gradients for {len(program.inputs)} inputs",
                where=here,
                code="program-malformed",
            )
        for index, gradient in enumerate(gradients.of_inputs):
            if gradient is not None:
                _check_tensor_input(index, program, "input of a gradient", here.at(index))
    with where.at("partitions") as here:
        if not gradients.partitions:
            raise BundleInvalid("a joint graph has no partition", where=here, code="program-malformed")
    with where.at("tangents") as here:
        check_unique([f"{tangent.of} {tangent.index}" for tangent in gradients.tangents], "tangent of", here)
    limits = {"mutation": len(functional.mutations), "output": len(program.outputs)}
    limits["intermediate_base"] = functional.intermediate_bases
    for index, tangent in enumerate(gradients.tangents):
        with where.at("tangents", index) as here:
            check_index(tangent.index, limits[tangent.of], "index of a tangent", here)
            _check_tangent(tangent, symbols, here)
    for index, detached in enumerate(gradients.detached_inputs):
        with where.at("detached_inputs", index) as here:
            _check_tensor_input(detached, program, "detached input", here)
    with where.at("checks") as here:
        check_unique([f"{check.of} {check.index}" for check in gradients.checks], "check of", here)
    for index, check in enumerate(gradients.checks):
        with where.at("checks", index) as here:
            _check_version_check(check, gradients, program, here)


def _check_version_check(check: VersionCheck, gradients: Gradients, program: Program, where: str) -> None:
    if check.of == "input":
        _check_tensor_input(check.index, program, "checked input", where)
    else:
        check_index(check.index, len(program.outputs), "checked output", where)
    check_unique(check.tangents, "tangent of a check", where)
    for tangent in check.tangents:
        check_index(tangent, len(gradients.tangents), "tangent of a check", where)


def _check_tangent(tangent: Tangent, symbols: set[str], where: str) -> None:
    check_meta(tangent.meta, symbols | introduced(tangent.meta), where)
    rank = len(tangent.meta.shape)
    if tangent.memory_format is not None:
        if tangent.memory_format == "preserve_format" or _RANKS.get(tangent.memory_format, rank) != rank:
            raise BundleInvalid(
                f"a tangent of {rank} axes has memory format {tangent.memory_format}",
                where=where,
                code="program-malformed",
            )
        return
    if tangent.stride is None or len(tangent.stride) != rank:
        raise BundleInvalid(f"a tangent of {rank} axes has no layout", where=where, code="program-malformed")
    check_meta(msgspec.structs.replace(tangent.meta, stride=tangent.stride), symbols, where)
