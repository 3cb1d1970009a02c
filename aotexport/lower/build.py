"""Lowered forms of the programs of an export: made per program, compiled together, written below `targets/`."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from msgspec.structs import replace

from aotexport.capture.functional.capture import Refused
from aotexport.capture.trace.forward_capture import ForwardCapture
from aotexport.encode.program import EncodedProgram
from aotexport.lower.targets import Targets
from aotexport.torch_internals.functional import FunctionalCapture
from aotexport_runtime.allowed.operators import VIEWS
from aotexport_runtime.schema.codec import encode_record
from aotexport_runtime.schema.graph import Graph, Node
from aotexport_runtime.schema.program import FreshOutput, FunctionalGraph
from aotexport_runtime.schema.sizes import SizeExpression
from aotexport_runtime.schema.values import Argument, DeviceArgument, DTypeArgument, SizeArgument, TensorMeta

CUDA = "cuda"
"""The target that has lowered graphs and kernels."""


def with_lowered(
    program: EncodedProgram, forward: ForwardCapture, functional: FunctionalCapture | Refused, targets: Targets
) -> EncodedProgram:
    """Return a program with its lowered form, or with a note why it has none."""
    if not targets.cuda:
        return program
    if isinstance(functional, Refused) or program.record.functional is None:
        return _noted(program, "it has no functional graph")
    from aotexport.lower.cuda.lowering import lower_program
    from aotexport.lower.cuda.retarget import CannotLower

    try:
        return dataclasses.replace(program, lowered=lower_program(program.record, forward, functional))
    except CannotLower as error:
        return _noted(program, str(error))


def with_results_apart(program: EncodedProgram) -> EncodedProgram:
    """Return a program whose kernels share memory with inputs only where its functional graph does."""
    functional, lowered = program.record.functional, program.lowered
    if lowered is None or functional is None:
        return program
    file = lowered.record.forward
    graph = unshared(lowered.graphs[file], program.graphs[functional.file], functional)
    return dataclasses.replace(program, lowered=dataclasses.replace(lowered, graphs={**lowered.graphs, file: graph}))


def _noted(program: EncodedProgram, reason: str) -> EncodedProgram:
    note = f"program {program.record.name} has no kernels: {reason}"
    return dataclasses.replace(program, notes=(*program.notes, note))


@dataclasses.dataclass(frozen=True)
class TargetFiles:
    """Files that lowered programs share, by path below `targets/cuda/`, and sentences on failures."""

    files: dict[str, bytes] = dataclasses.field(default_factory=dict)
    notes: tuple[str, ...] = ()


def compile_targets(
    programs: Sequence[EncodedProgram],
    targets: Targets,
    progress: Callable[[int, int], None],
    *,
    root: Path | None = None,
) -> TargetFiles:
    """Compile the kernels that lowered programs launch.

    `progress` is called with the number of finished compilations and of all. `root` is the directory that source files
    of the user are relative to; without it, kernels do not record the user's lines.
    """
    lowered = [program.lowered for program in programs if program.lowered is not None]
    if not lowered:
        return TargetFiles()
    from aotexport.lower.cuda.compile import compile_kernels, library_files
    from aotexport.lower.cuda.sources import joined

    kernels = joined(kernel for program in lowered for kernel in program.kernels)
    compiled = compile_kernels(kernels.values(), targets.cuda, progress=progress)
    files = library_files(kernels.values(), compiled, targets.cuda, root)
    notes = tuple(
        f"kernel {job.kernel} (candidate {job.candidate}) has no code for {job.architecture}: {reason}"
        for job, reason in compiled.failures.items()
    )
    return TargetFiles({f"kernels/{name}": data for name, data in files.items()}, notes)


def write_targets(programs: Sequence[EncodedProgram], shared: TargetFiles, directory: Path) -> None:
    """Write the lowered forms of programs below `directory`, in place of those there."""
    root = directory / "targets" / CUDA
    shutil.rmtree(root, ignore_errors=True)
    files: dict[str, bytes] = {}
    for program in programs:
        if (lowered := program.lowered) is not None:
            place = f"programs/{program.record.name}"
            files[f"{place}/lowered.json"] = encode_record(lowered.record)
            for name, graph in lowered.graphs.items():
                files[f"{place}/{name}"] = encode_record(graph, indent=False)
    for name, data in (files | shared.files if files else files).items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)


_SHARING = VIEWS | {"chunk", "contiguous", "getitem", "split", "split_with_sizes", "unbind"}
"""Base names of operators whose results share memory with their first argument, or may."""


def unshared(graph: Graph, functional: Graph, convention: FunctionalGraph) -> Graph:
    """Return a lowered forward with copies of results that must not share memory with an input.

    These are fresh outputs and intermediate bases, unless `functional`, the graph that it stands for, returns memory of
    that input, too: views that one operator makes together, or a custom autograd function. And they are saved tensors
    and new contents of inputs, where the call changes the input that they share memory with, unless these are its new
    metadata.
    """
    bases, shared = _bases(graph), _bases(functional)
    changed = {change.input_index for change in (*convention.mutations, *convention.version_rises)}
    returned = len(convention.mutations) + len(convention.outputs) + convention.intermediate_bases
    nodes, outputs = list(graph.nodes), list[Argument]()
    for index, output in enumerate(graph.outputs):
        if isinstance(output, str) and output in bases:
            base = bases[output]
            if index < len(convention.mutations):
                mutation = convention.mutations[index]
                is_copied = base in changed and (mutation.data or mutation.input_index != base)
            elif index < returned:
                own = functional.outputs[index]
                place = index - len(convention.mutations)
                is_fresh = place >= len(convention.outputs) or isinstance(convention.outputs[place], FreshOutput)
                is_copied = is_fresh and not (isinstance(own, str) and shared.get(own) == base)
            else:
                is_copied = base in changed
            if is_copied:
                nodes += _copy(graph, output, index)
                output = nodes[-1].name
        outputs.append(output)
    return replace(graph, nodes=tuple(nodes), outputs=outputs)


def _bases(graph: Graph) -> Mapping[str, int]:
    bases = {value.name: index for index, value in enumerate(graph.inputs)}
    for node in graph.nodes:
        base = node.op.partition("::")[2].partition(".")[0]
        if base in _SHARING and node.args and isinstance(node.args[0], str) and node.args[0] in bases:
            bases[node.name] = bases[node.args[0]]
    return bases


def _copy(graph: Graph, name: str, index: int) -> Iterator[Node]:
    """Yield the nodes of a copy with the strides of the value, also where these leave gaps or repeat elements."""
    meta = next(value.meta for value in (*graph.inputs, *graph.nodes) if value.name == name)
    assert isinstance(meta, TensorMeta)
    copied, place, stride = f"{name}:own:{index}", f"{name}:place:{index}", _sizes(meta.stride)
    once = replace(meta, shape=tuple([1 if step == 0 else n for n, step in zip(meta.shape, meta.stride, strict=True)]))
    kwargs: dict[str, Argument] = {"dtype": DTypeArgument(value=meta.dtype), "device": DeviceArgument(type="cuda")}
    sizes = [_sizes(once.shape), stride]
    yield Node(name=place, op="aten::empty_strided.default", args=[*sizes], kwargs=kwargs, meta=once)
    if once == meta:
        yield Node(name=copied, op="aten::copy_.default", args=[place, name], meta=meta)
        return
    first, written = f"{name}:first:{index}", f"{name}:written:{index}"
    yield Node(name=first, op="aten::as_strided.default", args=[name, *sizes], meta=once)
    yield Node(name=written, op="aten::copy_.default", args=[place, first], meta=once)
    yield Node(name=copied, op="aten::as_strided.default", args=[written, _sizes(meta.shape), stride], meta=meta)


def _sizes(sizes: Iterable[int | SizeExpression | str]) -> list[Argument]:
    return [size if isinstance(size, int) else SizeArgument(value=size) for size in sizes]
