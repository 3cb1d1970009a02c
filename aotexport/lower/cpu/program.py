"""Programs to their libraries for processors: functional graphs, whole or partitioned into forward and backward."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec
import torch

from aotexport.eager.recorded_arguments import symbols_of
from aotexport.encode.program import EncodedProgram
from aotexport.errors import AttemptFailed
from aotexport.lower.cpu.partition import NotLowered, Piece, lower_subgraph
from aotexport.lower.targets import Level
from aotexport.model.refusals import attempt
from aotexport.vectors.record import RecordedCall
from aotexport.write.files import custom_operators
from aotexport_runtime.errors import first_line
from aotexport_runtime.rewrite.names import impure_nodes
from aotexport_runtime.rewrite.partition import Subgraph, partition_graph, views_recomputed, with_tangents
from aotexport_runtime.rewrite.recompute import computed_again
from aotexport_runtime.schema.codec import encode_record
from aotexport_runtime.schema.graph import Graph
from aotexport_runtime.schema.program import FunctionalGraph, SizeInput, Tangent
from aotexport_runtime.schema.sizes import SizeExpression
from aotexport_runtime.schema.targets import CompiledProgram, CpuRequirements, Target, TargetRefusal

RECORD_NAME = "target.json"


def lower_programs(
    programs: Sequence[EncodedProgram],
    levels: Sequence[Level],
    vectors: Sequence[RecordedCall],
    directory: Path,
    progress: Callable[[str], None],
) -> list[EncodedProgram]:
    """Compile captured and verified programs for processors; write libraries and records below the bundle's directory.

    `vectors` are the recorded calls, with each program's example. Returns the programs, with the targets that have
    them.
    """
    examples = {vector.record.program: vector.record for vector in vectors if vector.name == "example"}
    prepared = [_with_partition(program) for program in programs] if levels else list(programs)
    for level in levels:
        folder = directory / "targets" / level.target
        folder.mkdir(parents=True)
        compiled: list[CompiledProgram] = []
        refusals: list[TargetRefusal] = []
        for index, program in enumerate(prepared):
            name = program.record.name
            progress(f"{name}: {level.target}")
            try:
                if program.launched:
                    raise NotLowered(f"it launches the Triton kernel `{program.launched[0]}`, which CPUs cannot run")
                sizes = symbols_of(program.record, examples[name].inputs)
                namespaces = frozenset(op.partition("::")[0] for op in custom_operators([program]))
                compiled.append(_lower(program, level, sizes, namespaces, folder))
            except NotLowered as error:
                refusals.append(TargetRefusal(program=name, reason=str(error)))
            else:
                prepared[index] = dataclasses.replace(program, compiled=(*program.compiled, level.target))
        requirements = CpuRequirements(level=level.name, torch=".".join(torch.__version__.split(".")[:2]))
        target = Target(
            name=level.target, requirements=requirements, programs=tuple(compiled), refusals=tuple(refusals)
        )
        write_target(target, directory)
    # A partition that nothing was compiled by is not kept.
    return [new if new.compiled != old.compiled else old for new, old in zip(prepared, programs, strict=True)]


def write_target(target: Target, directory: Path) -> None:
    """Write the record of `target` below `directory`, and remove files that it does not name."""
    folder = directory / "targets" / target.name
    named = {half.file for each in target.programs for half in (each.forward, each.backward) if half is not None}
    for path in folder.iterdir():
        if path.name not in named:
            path.unlink()
    (folder / RECORD_NAME).write_bytes(encode_record(target))


def without_program(target: Target, program: str, reason: str) -> Target:
    """Return `target` without `program`, which `reason` rules out."""
    remaining = tuple(compiled for compiled in target.programs if compiled.program != program)
    refusals = (*target.refusals, TargetRefusal(program=program, reason=reason))
    return msgspec.structs.replace(target, programs=remaining, refusals=refusals)


def _lower(
    program: EncodedProgram, level: Level, sizes: Mapping[str, int], namespaces: frozenset[str], directory: Path
) -> CompiledProgram:
    """Compile the functional graph of `program`, prepared by `_with_partition`, to libraries in `directory`.

    `sizes` are the values of symbols in the example call, `namespaces` those of the custom operators that it calls.
    """
    record, functional = program.record, program.record.functional
    if functional is None:
        raise NotLowered("it has no functional graph")
    if any(not isinstance(spec, SizeInput) and spec.subclass is not None for spec in record.inputs):
        raise NotLowered("it takes tensors of subclasses apart")
    takes_grad = any(not isinstance(spec, SizeInput) and spec.meta.requires_grad for spec in record.inputs)
    if record.grad and takes_grad and functional.gradients is None:
        raise NotLowered("its calls record gradients, and none of its results has one")
    graph = program.graphs[functional.file]
    undefined = () if functional.gradients is None else _beside_the_loss(functional.gradients.tangents)
    if len(graph.nodes) > 10 * len(program.graphs[record.forward.file].nodes) + 50:
        raise NotLowered("its functional graph takes apart operators that run faster whole (recurrent layers)")
    written = _written(program)
    pieces = [
        Piece(graph, subgraph, record, sizes, namespaces, written)
        for subgraph in _subgraphs(graph, functional, undefined, steps=program.optimizer is not None)
    ]
    names = ("forward", "backward")
    # Every trace assumes that dynamic sizes are neither 0 nor 1.
    guards = [SizeExpression(op="le", args=(2, d.symbol)) for d in record.dimensions if (d.min or 0) < 2]
    compiled = []
    for name, piece in zip(names, pieces, strict=False):
        try:
            # Torch's compiler warns of its own deprecations.
            with attempt("libraries for CPUs"), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                library, assumed = lower_subgraph(piece, level, f"{record.name}.{name}.so", directory)
        except AttemptFailed as refusal:
            error = refusal.error
            raise NotLowered(f"the compiler fails: {type(error).__name__}: {first_line(error)}") from refusal.error
        guards += [guard for guard in assumed if guard not in guards]
        compiled.append(library)
    return CompiledProgram(
        program=record.name,
        partition=None if functional.gradients is None else functional.gradients.partitions[-1].name,
        guards=tuple(guards),
        forward=compiled[0],
        backward=compiled[1] if len(compiled) > 1 else None,
        undefined_tangents=undefined,
    )


def _written(program: EncodedProgram) -> dict[str, str]:
    """Return the inputs that the library of a training step writes, each with its new value; others write none."""
    functional = program.record.functional
    if functional is None or program.optimizer is None:
        return {}
    graph = program.graphs[functional.file]
    pairs = zip(functional.mutations, graph.outputs, strict=False)
    of_elements = [(each, value) for each, value in pairs if not (each.metadata or each.storage)]
    return {graph.inputs[each.input_index].name: value for each, value in of_elements if isinstance(value, str)}


def _with_partition(program: EncodedProgram) -> EncodedProgram:
    """Return `program` with the partition that its joint graph is compiled by, if that is not the default one."""
    functional = program.record.functional
    if functional is None or functional.gradients is None:
        return program
    gradients, graph = functional.gradients, program.graphs[functional.file]
    partition = views_recomputed(graph, functional, gradients.partitions[0])
    is_known = any(other.name == partition.name for other in gradients.partitions)
    if is_known or partition.saved == gradients.partitions[0].saved:
        return program
    gradients = msgspec.structs.replace(gradients, partitions=(*gradients.partitions, partition))
    functional = msgspec.structs.replace(functional, gradients=gradients)
    return dataclasses.replace(program, record=msgspec.structs.replace(program.record, functional=functional))


def _beside_the_loss(tangents: Sequence[Tangent]) -> tuple[int, ...]:
    """Return the tangents that a training step leaves undefined: all but that of the first output that is a number."""
    losses = [index for index, tangent in enumerate(tangents) if tangent.of == "output" and not tangent.meta.shape]
    return tuple(index for index in range(len(tangents)) if index != losses[0]) if losses else ()


def _subgraphs(graph: Graph, functional: FunctionalGraph, undefined: Sequence[int], *, steps: bool) -> list[Subgraph]:
    """Return the forward and backward for a call in which every gradient is wanted, or the whole inference graph.

    `steps`: whether it is a training step, whose loss comes after the new values.
    """
    gradients = functional.gradients
    if gradients is None:
        nodes = computed_again(graph.nodes, str(graph.outputs[len(functional.mutations)])) if steps else graph.nodes
        return [Subgraph([value.name for value in graph.inputs], list(nodes), graph.outputs)]
    needed = [index is not None for index in gradients.of_inputs]
    partitioned = partition_graph(graph, functional, gradients.partitions[-1], needed, impure_nodes(graph))
    defined = [index not in undefined for index in range(len(gradients.tangents))]
    return [partitioned.forward, with_tangents(graph, partitioned.backward, defined)]
