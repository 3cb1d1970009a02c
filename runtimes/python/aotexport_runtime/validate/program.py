"""Rules of a program, whose parts refer to each other within bounds, and of the graphs that it calls."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import get_args

import msgspec

from aotexport_runtime.allowed.operators import VIEWS, aten_signatures
from aotexport_runtime.allowed.signatures import signature_of
from aotexport_runtime.errors import Place
from aotexport_runtime.schema import program as specs
from aotexport_runtime.schema import trees
from aotexport_runtime.schema.graph import Graph
from aotexport_runtime.schema.manifest import Manifest
from aotexport_runtime.schema.program import FreshOutput, FunctionalGraph, Gradients, Program, SizeInput, StateInput
from aotexport_runtime.schema.values import Argument, NothingMeta, SizeMeta, TensorMeta, ValueMeta
from aotexport_runtime.validate import arguments
from aotexport_runtime.validate.arguments import check_index, check_meta, described, introduced, metas_of, references
from aotexport_runtime.validate.declared import check_declared
from aotexport_runtime.validate.graph import check_allowed
from aotexport_runtime.validate.trees import check_differentiable, check_keys, check_parts, taken_apart
from aotexport_runtime.validate.types import takes
from aotexport_runtime.values.trees import arrays_in, leaves, steps

_RANKS = {"channels_last": 4, "channels_last_3d": 5}
_ARRAY_DTYPES = frozenset((*get_args(trees.NumpyType), "complex64", "complex128"))
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
    state = {name: tensor for tensor in manifest.state for name in (tensor.name, *tensor.tied)}
    for index, spec in enumerate(program.inputs):
        with where.at("inputs", index) as here:
            if isinstance(spec, StateInput):
                subject, stored = f"input {spec.name[:80]!r}", state.get(spec.name)
                if stored is None:
                    raise here.invalid(f"{subject} is not in the manifest's state", "reference-missing/state")
                is_same = (spec.meta.dtype, spec.meta.shape) == (stored.dtype, stored.shape)
                here.require(is_same, f"{subject} is not what the manifest's state says", "state-differs/tensor")
                metas, own = ([(part.dtype, part.shape) for part in each.parts] for each in (stored, spec))
                is_same = spec.subclass == stored.subclass and own == metas
                here.require(is_same, f"{subject} is not made of what the manifest's state says", "state-differs/parts")
            if not isinstance(spec, SizeInput):
                check_meta(spec.meta, symbols, here)
                check_parts(spec, symbols, here)
                for part in spec.parts:
                    check_meta(part, symbols, here)
                check_differentiable(spec.meta, "an input", here)
    for index, dimension in enumerate(program.dimensions):
        with where.at("dimensions", index) as here:
            spec = program.inputs[dimension.input_index]
            if isinstance(spec, StateInput):
                raise here.invalid("a dimension is read from a state tensor", "program-malformed/dimension-of-state")
            if not isinstance(spec, SizeInput):
                rank = len(spec.meta.shape)
                check_index(dimension.axis, rank, "axis of a dimension", "index-range/dimension-axis", here)
            here.require(dimension.factor != 0, "a dimension has factor 0", "program-malformed/dimension-factor")
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


def _check_parameters(program: Program, where: Place) -> None:
    kinds = [parameter.kind for parameter in program.parameters]
    for kind in ("var_positional", "var_keyword"):
        where.expect(kinds.count(kind) <= 1, f"several parameters are {kind}", "program-malformed/parameter-kind")
    for index, parameter in enumerate(program.parameters):
        subject, here = f"parameter `{parameter.name[:80]}`", where.at(index)
        if parameter.kind == "var_positional" and not isinstance(parameter.tree, trees.Sequence):
            here.refuse(f"{subject} is var_positional and no sequence", "program-malformed/var-positional")
        if parameter.kind == "var_keyword" and not isinstance(parameter.tree, trees.Mapping):
            here.refuse(f"{subject} is var_keyword and no mapping", "program-malformed/var-keyword")


def _leaves(found: list[trees.Tree]) -> list[trees.Leaf]:
    return [leaf for tree in found for _, leaf in leaves(tree) if isinstance(leaf, trees.Leaf)]


def _check_passed(program: Program, where: Place) -> None:
    passed = {leaf.index for leaf in _leaves([each.tree for each in program.parameters if not each.optional])}
    for index, spec in enumerate(program.inputs):
        if not isinstance(spec, StateInput) and index not in passed:
            message = f"no parameter has the argument `{spec.path[:80]}`"
            where.at("inputs", index).refuse(message, "program-malformed/argument")


def _check_arrays(program: Program, where: Place) -> None:
    """Refuse NumPy arrays that no call can pass or return, and indices of arrays in one place alone."""
    put = [item for change in program.container_changes for item in change.items if item is not None]
    for kind, found in (("input", [each.tree for each in program.parameters]), ("output", [program.output_tree, *put])):
        arrays = arrays_in(found)
        for leaf in _leaves(found):
            message = f"{kind} {leaf.index} is an array in one place, and none in another"
            where.require(leaf.array or leaf.index not in arrays, message, "structure-malformed/array-mixed")
        for index in sorted(arrays):
            spec = program.inputs[index] if kind == "input" else None
            meta = program.outputs[index] if spec is None else getattr(spec, "meta", None)
            is_plain = isinstance(spec, specs.ArgumentInput) and not (spec.subclass or spec.meta.requires_grad)
            message = f"input {index} is an array, and no plain argument without gradients"
            where.require(spec is None or is_plain, message, "structure-malformed/array-input")
            message = f"{kind} {index} is an array, and NumPy has no such values"
            is_known = meta is not None and meta.dtype in _ARRAY_DTYPES
            where.require(is_known, message, "structure-malformed/array-dtype")


def _check_container_changes(program: Program, where: Place) -> None:
    """Refuse changes of containers that no call passes, or that such a container cannot take."""
    passed = {path: tree for p in program.parameters if not p.optional for path, tree in _containers(p.tree, p.name)}
    for index, change in enumerate(program.container_changes):
        with where.at("container_changes", index) as here:
            subject, tree = f"container {change.path[:80]!r}", passed.get(change.path)
            if tree is None:
                raise here.invalid(f"every call must pass the changed {subject}", "reference-missing/container")
            check_keys(change.keys, here)
            fits = len(set(change.keys)) == len(change.keys) == len(change.items)
            here.require(fits, f"the keys of the changed {subject} do not fit", "program-malformed/container-keys")
            message = f"the {subject} cannot be changed so"
            here.require(_takes(tree, change), message, "program-malformed/container-change")


def _containers(tree: trees.Tree, path: str) -> Iterator[tuple[str, trees.Tree]]:
    if isinstance(tree, trees.Leaf | trees.Constant):
        return
    yield path, tree
    for step, item in zip(steps(tree), tree.items, strict=True):
        yield from _containers(item, path + step)


def _takes(tree: trees.Tree, change: specs.ContainerChange) -> bool:
    """Return whether a container can be changed so, and has the items that stay."""
    stays = {key for key, item in zip(change.keys, change.items, strict=True) if item is None}
    if isinstance(tree, trees.Sequence) and tree.type == "set":
        # A set has no keys: all of its items are new.
        return not stays and all(isinstance(item, trees.Constant) for item in change.items)
    if isinstance(tree, trees.Sequence) and tree.type in ("list", "deque"):
        return change.keys == tuple(range(len(change.keys))) and stays <= set(range(len(tree.items)))
    if isinstance(tree, trees.Mapping):
        return stays <= set(tree.keys)
    if not isinstance(tree, trees.NamedFields) or tree.type not in ("dataclass", "object"):
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
            of = functional.outputs[output.output_index] if isinstance(output, specs.OutputAlias) else None
            if isinstance(output, specs.OutputAlias) and not isinstance(of, FreshOutput):
                message = f"output_index of an output is {output.output_index}, which is no new tensor"
                raise here.invalid(message, "program-malformed/alias-of-alias")
            for number, step in enumerate((output.steps or ()) if isinstance(output, specs.Alias) else ()):
                _check_step(step, here.at("steps", number))
    if functional.gradients is not None:
        _check_gradients(functional.gradients, functional, plain, symbols, where.at("gradients"))


def _check_step(step: specs.ViewStep, where: Place) -> None:
    check_allowed(step.op, set(), where=where)
    is_view = step.op.removeprefix("aten::").partition(".")[0] in VIEWS
    where.require(is_view, f"operator `{step.op}` of a view step is no view", "operator-unlisted/view")
    if step.item is not None:
        raise where.invalid("`item` of a view step is set: no view has several results", "program-malformed/step-item")
    for argument in step.args:
        arguments.check_constant(argument, "an argument of a view step", where)
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
            check_meta(tangent.meta, symbols | introduced(tangent.meta), here)
            rank, layout = len(tangent.meta.shape), tangent.memory_format
            if layout is not None:
                fits = layout != "preserve_format" and _RANKS.get(layout, rank) == rank
                message = f"a tangent of {rank} axes has memory format {layout}"
                here.require(fits, message, "program-malformed/tangent-format")
            elif tangent.stride is None or len(tangent.stride) != rank:
                raise here.invalid(f"a tangent of {rank} axes has no layout", "program-malformed/tangent-stride")
            else:
                check_meta(msgspec.structs.replace(tangent.meta, stride=tangent.stride), symbols, here)
    for index, check in enumerate(gradients.checks):
        with where.at("checks", index) as here:
            checked = program.inputs if check.of == "input" else program.outputs
            check_index(check.index, len(checked), f"checked {check.of}", "index-range/checked", here)
            is_tensor = not isinstance(checked[check.index], SizeInput)
            message = f"checked input is {check.index}, which is no tensor"
            here.require(is_tensor, message, "program-malformed/checked-number")


def check_forward_graph(graph: Graph, program: Program, *, where: Place) -> None:
    """Refuse a forward graph that does not take the program's inputs and return its outputs."""
    _check_graph_inputs(graph, program, [], where)
    message = f"{len(graph.outputs)} outputs for the program's {len(program.outputs)}"
    where.at("outputs").expect(len(graph.outputs) == len(program.outputs), message, "graph-interface/outputs")
    _check_results(graph, graph.outputs, program.outputs, where, ())


def check_functional_graph(
    graph: Graph, program: Program, functional: FunctionalGraph, *, where: Place, record: str
) -> None:
    """Refuse a joint or inference graph that breaks the calling convention of a checked program of file `record`."""
    program, gradients = taken_apart(program), functional.gradients
    _check_graph_inputs(
        graph, program, [] if gradients is None else [tangent.meta for tangent in gradients.tangents], where
    )
    for index, node in enumerate(graph.nodes):
        if node.op.startswith("torch::"):
            message = f"`{node.op}` changes the state of the interpreter; a functional graph may not"
            where.at("nodes", index, "op").refuse(message, "operator-unlisted/functional")
    returned = returned_count(functional)
    if len(graph.outputs) < returned or (gradients is None and len(graph.outputs) > returned):
        message = f"{len(graph.outputs)} outputs; the calling convention has {returned}"
        where.at("outputs").refuse(message, "graph-interface/outputs")
        return
    faults, mutations = where.found, len(functional.mutations)
    # An epilogue needs tensors in the place of mutated values, aliases and bases.
    fresh = {index for index, each in enumerate(functional.outputs, mutations) if isinstance(each, FreshOutput)}
    for index, output in enumerate(graph.outputs[:returned]):
        if index not in fresh and not isinstance(output, str):
            where.at("outputs", index).refuse(f"output {index} of the graph is no value", "graph-interface/value")
    if where.found == faults:
        changed = [_meta_of(program.inputs[each.input_index]) for each in functional.mutations]
        # These may get other axes, and a storage of another dtype.
        anew = {index for index, each in enumerate(functional.mutations) if each.metadata or each.storage}
        outputs = graph.outputs[: mutations + len(program.outputs)]
        _check_results(graph, outputs, [*changed, *program.outputs], where, anew)
    if gradients is not None and where.found == faults:
        said = Place(record).at("functional", "gradients")
        _check_tangents(graph, functional, gradients, said)
        _check_graph_gradients(graph, program, gradients, returned, where, said)


def returned_count(functional: FunctionalGraph) -> int:
    """Return how many values a functional graph returns before gradients."""
    return len(functional.mutations) + len(functional.outputs) + functional.intermediate_bases


def _check_tangents(graph: Graph, functional: FunctionalGraph, gradients: Gradients, said: Place) -> None:
    metas, mutations = metas_of(graph), len(functional.mutations)
    first = {"mutation": 0, "output": mutations, "intermediate_base": mutations + len(functional.outputs)}
    for index, tangent in enumerate(gradients.tangents):
        value = graph.outputs[first[tangent.of] + tangent.index]
        of = described(metas.get(value) if isinstance(value, str) else None)
        if tangent.of == "output" and not isinstance(functional.outputs[tangent.index], FreshOutput):
            of = "what is no new tensor"
        message = f"a tangent is {described(tangent.meta)}, and belongs to {of}"
        said.at("tangents", index).expect(described(tangent.meta) == of, message, "program-malformed/tangent-value")


def _check_graph_gradients(
    graph: Graph, program: Program, gradients: Gradients, returned: int, where: Place, said: Place
) -> None:
    """Refuse gradients of another type than their input, and partitions that the graph does not have."""
    metas = metas_of(graph)
    for index, gradient in enumerate(gradients.of_inputs):
        if gradient is None:
            continue
        message = f"gradient {gradient} is not among the outputs {returned} to {len(graph.outputs) - 1}"
        said.at("of_inputs", index).expect(returned <= gradient < len(graph.outputs), message, "index-range/gradient")
        output = graph.outputs[gradient] if gradient < len(graph.outputs) else None
        found = metas.get(output) if isinstance(output, str) else None
        of = described(_meta_of(program.inputs[index]))
        if output is not None and not isinstance(found, NothingMeta) and described(found) != of:
            message = f"the gradient of input {index} is {described(found)}, and the input {of}"
            where.at("outputs", gradient).refuse(message, "result-type/gradient")
    late = arguments.descendants(graph.nodes, {each.name for each in graph.inputs[len(program.inputs) :]})
    for index, argument in enumerate(graph.outputs[:returned]):
        message = "an output of the forward needs an incoming gradient"
        where.at("outputs", index).expect(late.isdisjoint(references(argument)), message, "partition-malformed/forward")
    for index, partition in enumerate(gradients.partitions):
        for position, name in enumerate(partition.saved):
            if name not in metas or name in late:
                reason = "is not in the graph" if name not in metas else "needs an incoming gradient"
                place = said.at("partitions", index, "saved", position)
                place.refuse(f"saved value {name[:80]!r} {reason}", "partition-malformed/saved")


def _check_results(
    graph: Graph, outputs: list[Argument], said: Sequence[ValueMeta | None], where: Place, anew: Collection[int]
) -> None:
    """Refuse outputs whose metadata are not what the program says (None: a number). `anew`: may be any tensors."""
    metas = metas_of(graph)
    for index, (output, expected) in enumerate(zip(outputs, said, strict=False)):
        found = arguments.described_argument(output, metas)
        found = "a number" if found in ("an integer", "a float") else found
        required = "a number" if expected is None else described(expected)
        is_free = found is None or (index in anew and found.startswith("a tensor"))
        message = f"output {index} of the graph is {found}, and the program says {required}"
        where.at("outputs", index).expect(found == required or is_free, message, "result-type/output")


def _check_graph_inputs(graph: Graph, program: Program, tangents: Sequence[TensorMeta], where: Place) -> None:
    metas = [*map(_meta_of, program.inputs), *tangents]
    message = f"{len(graph.inputs)} inputs; the program passes {len(metas)}"
    where.at("inputs").expect(len(graph.inputs) == len(metas), message, "graph-interface/inputs")
    for index, (graph_input, meta) in enumerate(zip(graph.inputs, metas, strict=False)):
        found = graph_input.meta
        is_same = isinstance(meta, SizeMeta) and isinstance(found, SizeMeta)
        if isinstance(meta, TensorMeta) and isinstance(found, TensorMeta):
            is_same = (found.dtype, found.shape) == (meta.dtype, meta.shape)
        message = f"input {index} of the graph is not what the program passes"
        where.at("inputs", index).expect(is_same, message, "graph-interface/input")


def _meta_of(spec: specs.InputSpec) -> ValueMeta:
    return SizeMeta() if isinstance(spec, SizeInput) else spec.meta
