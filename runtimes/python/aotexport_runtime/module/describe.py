"""A bundle in words, and as JSON for tools. No torch."""

from __future__ import annotations

import math
from html import escape
from typing import Any

import msgspec

from aotexport_runtime.bundle.notes import notes_of
from aotexport_runtime.bundle.read import Bundle
from aotexport_runtime.engines.candidates import PORTABLE, Request
from aotexport_runtime.engines.select import select_engine
from aotexport_runtime.errors import printable
from aotexport_runtime.rows.analysis import dependence, row_axes
from aotexport_runtime.schema.graph import Graph, Node, Subclass
from aotexport_runtime.schema.manifest import Ancestor
from aotexport_runtime.schema.program import (
    ArgumentInput,
    FreshOutput,
    InputAlias,
    InputItself,
    InputMutation,
    IntermediateAlias,
    OutputAlias,
    OutputSpec,
    Program,
    StateInput,
)
from aotexport_runtime.schema.trees import Constant, NumpyNumber, PythonValue
from aotexport_runtime.schema.values import (
    Argument,
    ComplexArgument,
    FloatArgument,
    ScalarMeta,
    SizeArgument,
    SizeMeta,
    SliceArgument,
    StringArgument,
    TensorMeta,
    ValueMeta,
)
from aotexport_runtime.validate.trees import taken_apart
from aotexport_runtime.values.sizes import describe as describe_size
from aotexport_runtime.values.sizes import describe_range, type_of
from aotexport_runtime.values.trees import leaves, python_value


def describe(bundle: Bundle, *, program: str | None = None, graph: bool = False) -> str:
    """Return the text that `inspect` shows, of one program or of all, with their graphs or without."""
    lines = [] if program else describe_overview(bundle)
    lines += [f"  {note.shown()}" for note in notes_of(bundle, program)]
    for name in [program] if program else bundle.program_names:
        lines += _program(bundle, bundle.program(name), graph=graph)
    if not program:
        files = [f"  {entry.sha256[:12]}  {entry.nbytes:>12,}  {entry.path}" for entry in bundle.manifest.files]
        lines += ["", "files", *files]
    return "\n".join(printable(line).replace("\n", "\\n") for line in lines)


def describe_overview(bundle: Bundle) -> list[str]:
    """Return lines that say what a whole bundle is, the first with its name."""
    manifest = bundle.manifest
    parameters = [entry for entry in manifest.state if entry.role == "parameter"]
    count = sum(math.prod(entry.shape) for entry in parameters)
    nbytes = sum(entry.nbytes for entry in manifest.files)
    lines = [
        f"{manifest.name} ({manifest.kind}), format {manifest.format}, readable from format {manifest.min_reader}",
        f"  written by aotexport {manifest.producer.aotexport} with torch {manifest.producer.torch}",
        f"  {len(parameters)} parameters ({count:,} elements), {len(manifest.state) - len(parameters)} buffers and "
        f"constants, {len(manifest.files)} files, {nbytes:,} bytes",
        f"  trust needed: {trust_needed(bundle)}; recorded calls: {len(manifest.testvectors)}",
    ]
    tied = [entry for entry in manifest.state if entry.tied]
    lines += [f"  tied: {entry.name} = {' = '.join(entry.tied)}" for entry in tied]
    if namespaces := manifest.requirements.operator_namespaces:
        lines.append(f"  needs custom operators of: {', '.join(namespaces)}")
    if types := manifest.requirements.tensor_types:
        lines.append(f"  needs classes of tensors: {', '.join(types)}")
    lines += [f"  {e.name} is a {describe_subclass(e.subclass)}" for e in manifest.state if e.subclass is not None]
    lines += [f"  extension: {name}" for name in manifest.extensions]
    return [*lines, *(f"  made of {_ancestor(ancestor)}" for ancestor in manifest.ancestors)]


def describe_html(bundle: Bundle, modules: str) -> str:
    """Return what a notebook shows of a loaded bundle: its overview, programs, and the text of its modules, folded."""
    head, *facts = describe_overview(bundle)
    folded = dict[str, str]()
    for program in map(bundle.program, bundle.program_names):
        found = sections(bundle, program)
        lines = (f"{title}: {line}" for title in ("inputs", "outputs", "changes") for line in found[title])
        folded[describe_program(bundle, program)] = "\n".join(lines)
    parts = [f"<b>{escape(printable(head))}</b>", *(f"<br>{escape(printable(fact.strip()))}" for fact in facts)]
    for title, text in (folded | {"modules": modules}).items():
        shown = f"<summary>{escape(printable(title))}</summary><pre>{escape(printable(text))}</pre>"
        parts.append(f"<details>{shown}</details>")
    return "".join(parts)


def _ancestor(ancestor: Ancestor) -> str:
    """Return a bundle that another was made of, with what was changed."""
    at = f" as `{ancestor.path}`" if ancestor.path else ""
    changes = f" ({'; '.join(ancestor.changes)})" if ancestor.changes else ""
    return f"{ancestor.name}{at}, sha256 {ancestor.sha256[:12]}{changes}"


def _program(bundle: Bundle, program: Program, *, graph: bool) -> list[str]:
    found = sections(bundle, program)
    lines = ["", describe_program(bundle, program)]
    for title in ("inputs", "outputs"):
        lines += [f"  {title}:", *(f"    {line}" for line in found[title] or ["none"])]
    lines += [f"  {line}" for line in found["changes"]]
    for file in graph_files(program):
        loaded = bundle.graph(program.name, file)
        lines.append(f"  graph {file}: {len(loaded.nodes)} operators")
        if graph:
            lines += [f"    {line}" for line in describe_graph(loaded, _names(program))]
    refused = describe_refusals(bundle, program)
    return [*lines, *(f"  {line}" for line in (*found["preference"], *found["joining"], *refused))]


def sections(bundle: Bundle, program: Program) -> dict[str, list[str]]:
    """Return what `inspect` says of a program besides its graphs and refusals, by title."""
    return {
        "inputs": describe_inputs(program),
        "outputs": describe_outputs(program, _forward(bundle, program)),
        "changes": describe_changes(program),
        "preference": describe_preference(bundle, program),
        "joining": describe_joining(bundle, program),
    }


def graph_files(program: Program) -> list[str]:
    """Return the names of the program's graph files, the forward graph first."""
    return [program.forward.file] + ([program.functional.file] if program.functional else [])


def describe_program(bundle: Bundle, program: Program) -> str:
    """Return a line with the program's name, which calls reach it, and its targets."""
    entry = next(entry for entry in bundle.manifest.programs if entry.name == program.name)
    kind = f"{program.mode} mode" + (f" of `{program.method}`" if program.method != "forward" else "")
    kind += f", a variant of `{entry.variant_of}`" if entry.variant_of else ""
    kind += f", under autocast to {program.autocast}" if program.autocast else ""
    return f"program {program.name} ({kind}), targets: {', '.join(entry.targets)}"


def trust_needed(bundle: Bundle) -> str:
    """Return the tier of trust that the bundle needs, and which targets need more than data."""
    native = [name for name in bundle.target_names if bundle.target(name).programs]
    return f"data; native for {', '.join(native)}" if native else "data"


def describe_preference(bundle: Bundle, program: Program) -> list[str]:
    """Return a line that says which graph runs under target `auto`, without native code, where there are two."""
    if program.functional is None:
        return []
    choice = select_engine(bundle, program, Request())
    graph = "functional" if choice.because else "forward"
    return [f"under target auto the {graph} graph runs: {choice.because or choice.why_not[PORTABLE]}"]


def describe_joining(bundle: Bundle, program: Program) -> list[str]:
    """Return a line per size along which a server joins calls, or could but for an operator, which the line names."""
    if program.method != "forward" or program.mode == "train":
        return []
    reasons = [(axes.dimension.name, dependence(_forward(bundle, program), axes)) for axes in row_axes(program)]
    return [
        f"a server joins calls along {name}" if reason is None else f"calls are not joined along {name}: {reason}"
        for name, reason in reasons
    ]


def describe_refusals(bundle: Bundle, program: Program) -> list[str]:
    """Return a line per graph and per target that lacks `program`, and one if its forward graph lacks gradients."""
    lines = [f"no {each.graph} graph, the forward graph runs instead: {each.reason}" for each in program.refusals]
    targets = map(bundle.target, bundle.target_names)
    lines += [f"not for {t.name}: {r.reason}" for t in targets for r in t.refusals if r.program == program.name]
    if not program.forward.differentiable:
        lines.append("the forward graph is not differentiable: the module has custom autograd functions")
    return lines


def _forward(bundle: Bundle, program: Program) -> Graph:
    return bundle.graph(program.name, program.forward.file)


def _names(program: Program) -> dict[str, str]:
    return {dimension.symbol: dimension.name for dimension in program.dimensions}


def describe_inputs(program: Program) -> list[str]:
    """Return one line per argument of the call, and per dynamic dimension and guard."""
    names = _names(program)
    lines: list[str] = []
    for parameter in program.parameters:
        for path, leaf in leaves(parameter.tree, parameter.name):
            if isinstance(leaf, Constant):
                optional = ", may be left out" if parameter.optional else ""
                lines.append(f"{path}: fixed to {_argument(leaf.value)}{optional}")
                continue
            spec = program.inputs[leaf.index]
            if isinstance(spec, ArgumentInput):
                grad = ", requires grad" if spec.meta.requires_grad else ""
                again = f", the same tensor as {spec.path}" if spec.path != path else ""
                of = "" if spec.subclass is None else f" of {describe_subclass(spec.subclass)}"
                lines.append(f"{path}: {_tensor(spec.meta, names)}{of}{grad}{again}")
            elif isinstance(spec, StateInput):
                lines.append(f"{path}: the module's own {spec.name}")
            else:
                lines.append(f"{path}: int {names.get(spec.symbol, spec.symbol)}")
    for dimension in program.dimensions:
        lines.append(f"dimension {dimension.name} in {describe_range(dimension.min, dimension.max)}")
    lines += [f"only where {describe_size(guard, names)}" for guard in program.guards]
    return lines


def describe_outputs(program: Program, forward: Graph) -> list[str]:
    """Return one line per output leaf, with its alias story; `forward` has the types of numbers."""
    names = _names(program)
    metas = {value.name: value.meta for value in (*forward.inputs, *forward.nodes)}
    specs = program.functional.outputs if program.functional else ()
    lines: list[str] = []
    for path, leaf in leaves(program.output_tree, "output"):
        if isinstance(leaf, Constant):
            lines.append(f"{path}: {_argument(leaf.value)}")
            continue
        meta = program.outputs[leaf.index]
        value = _tensor(meta, names) if meta is not None else _number(forward.outputs[leaf.index], metas)
        story = _story(specs[leaf.index], program) if specs else ""
        lines.append(f"{path}: {value}{story}")
    return lines


def _number(output: Argument, metas: dict[str, ValueMeta]) -> str:
    """Return the Python type of an output that is a number."""
    if isinstance(output, FloatArgument):
        return "float"
    meta = metas.get(output) if isinstance(output, str) else None
    if isinstance(meta, ScalarMeta):
        return meta.type
    return type_of(meta.value) if isinstance(meta, SizeMeta) else type(output).__name__


def describe_subclass(record: Subclass) -> str:
    """Return the class of a tensor subclass with its inner tensors: `TwoTensor(a, b)`."""
    inner = [
        name if of is None else f"{name}: {describe_subclass(of)}"
        for name, of in zip(record.attributes, record.inner, strict=True)
    ]
    return f"{record.type.partition(':')[2]}({', '.join(inner)})"


def _story(spec: OutputSpec, program: Program) -> str:
    if isinstance(spec, FreshOutput):
        return ", differentiable" if spec.requires_grad else ""
    if isinstance(spec, InputItself):
        return f", is the input {_input_name(program, spec.input_index)} itself"
    if isinstance(spec, InputAlias):
        return f", a view of the input {_input_name(program, spec.input_index)}"
    if isinstance(spec, OutputAlias):
        return f", a view of output {spec.output_index}"
    assert isinstance(spec, IntermediateAlias)
    return f", a view of an intermediate (base {spec.base_index})"


def _input_name(program: Program, index: int) -> str:
    """Return the name of an input of the functional graph, which takes the parts of tensor subclasses."""
    spec = taken_apart(program).inputs[index]
    return spec.name if isinstance(spec, StateInput) else spec.path


def describe_changes(program: Program) -> list[str]:
    """Return one line per input or state tensor that a call changes."""
    lines = [f"replaces {rebind.name}" for rebind in program.rebinds]
    lines += [f"changes what is in {change.path}" for change in program.container_changes]
    for mutation in program.functional.mutations if program.functional else ():
        lines.append(f"changes {_change(mutation)} of {_input_name(program, mutation.input_index)}")
    return lines


def _change(mutation: InputMutation) -> str:
    parts = ["the values"] * mutation.data + ["the shape or strides"] * mutation.metadata
    return " and ".join(parts + ["the storage"] * mutation.storage)


def _tensor(meta: TensorMeta, names: dict[str, str]) -> str:
    return f"{meta.dtype}[{', '.join(describe_size(size, names) for size in meta.shape)}]"


def describe_graph(graph: Graph, names: dict[str, str]) -> list[str]:
    """Return one line per node: result, operator, arguments, metadata, source."""
    lines = [f"{value.name}: {describe_meta(value.meta, names)}" for value in graph.inputs]
    lines += [describe_node(node, graph, names) for node in graph.nodes]
    lines += [f"structure {i}: {describe_subclass(record)}" for i, record in enumerate(graph.subclasses)]
    lines.append("return " + ", ".join(_argument(output) for output in graph.outputs))
    return lines


def describe_node(node: Node, graph: Graph, names: dict[str, str]) -> str:
    """Return a line of a graph: result, operator, arguments, metadata, source."""
    arguments = [_argument(argument) for argument in node.args]
    arguments += [f"{key}={_argument(value)}" for key, value in node.kwargs.items()]
    source = graph.sources[node.source] if node.source is not None else None
    where = f"  # {source.file}:{source.line}" if source else ""
    return f"{node.name} = {node.op}({', '.join(arguments)}): {describe_meta(node.meta, names)}{where}"


def describe_meta(meta: ValueMeta, names: dict[str, str]) -> str:
    """Return the metadata of a value: `float32[batch, 4]`."""
    return _tensor(meta, names) if isinstance(meta, TensorMeta) else str(meta.__struct_config__.tag)


def _argument(argument: Argument | PythonValue) -> str:
    if isinstance(argument, NumpyNumber):
        return f"numpy.{argument.dtype}({_argument(argument.value)})"
    if isinstance(argument, PythonValue):
        return repr(python_value(argument))
    if isinstance(argument, list):
        return f"[{', '.join(_argument(item) for item in argument)}]"
    if isinstance(argument, SizeArgument):
        return describe_size(argument.value)
    if isinstance(argument, ComplexArgument):
        return f"({_argument(argument.real)} + {_argument(argument.imag)}j)"
    if isinstance(argument, SliceArgument):
        return f"{_argument(argument.start)}:{_argument(argument.stop)}:{_argument(argument.step)}"
    if isinstance(argument, StringArgument):
        return repr(argument.value)
    found = (getattr(argument, field) for field in ("value", "type", "name") if hasattr(argument, field))
    return str(next(found, argument))


def summary(bundle: Bundle, *, program: str | None = None, graph: bool = False) -> dict[str, Any]:
    """Return the data that `inspect --json` prints: the records, and one line per input, output and change."""
    names = (program,) if program else bundle.program_names
    programs: dict[str, Any] = {}
    for name in names:
        record = bundle.program(name)
        programs[name] = {"record": msgspec.to_builtins(record), **sections(bundle, record)}
        if graph:
            graphs = {file: msgspec.to_builtins(bundle.graph(name, file)) for file in graph_files(record)}
            programs[name]["graphs"] = graphs
    targets = {name: msgspec.to_builtins(bundle.target(name)) for name in bundle.target_names}
    notes = [note.as_json() for note in notes_of(bundle, program)]
    return {"manifest": msgspec.to_builtins(bundle.manifest), "notes": notes, "programs": programs, "targets": targets}
