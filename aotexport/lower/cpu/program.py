"""A program to its libraries: the functional graph, whole or partitioned into forward and backward."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from aotexport.encode.program import EncodedProgram
from aotexport.errors import AttemptFailed
from aotexport.lower.cpu.levels import Level
from aotexport.lower.cpu.partition import NotLowered, Piece, least_sizes, lower_subgraph
from aotexport.model.refusals import attempt
from aotexport_runtime.errors import first_line
from aotexport_runtime.rewrite.impure import impure_nodes
from aotexport_runtime.rewrite.partition import Subgraph, partition_graph, views_recomputed, with_tangents
from aotexport_runtime.schema.compiled import CompiledProgram
from aotexport_runtime.schema.gradients import Tangent
from aotexport_runtime.schema.graph import Graph
from aotexport_runtime.schema.program import FunctionalGraph, SizeInput
from aotexport_runtime.schema.sizes import SizeExpression


def lower_program(
    program: EncodedProgram, level: Level, sizes: Mapping[str, int], namespaces: frozenset[str], directory: Path
) -> CompiledProgram:
    """Compile the functional graph of `program`, prepared by `with_partition`, to libraries in `directory`.

    `sizes` are the values of symbols in the example call, `namespaces` those of the custom operators that it calls.

    Raises:
        NotLowered: it cannot be compiled; says why.
    """
    record, functional = program.record, program.record.functional
    if functional is None:
        raise NotLowered("it has no functional graph")
    if any(not isinstance(spec, SizeInput) and spec.subclass is not None for spec in record.inputs):
        raise NotLowered("it takes tensors of subclasses apart")
    graph = program.graphs[functional.file]
    undefined = () if functional.gradients is None else _beside_the_loss(functional.gradients.tangents)
    if len(graph.nodes) > 10 * len(program.graphs[record.forward.file].nodes) + 50:
        raise NotLowered("its functional graph takes apart operators that run faster whole (recurrent layers)")
    pieces = [
        Piece(graph, subgraph, record, sizes, namespaces) for subgraph in _subgraphs(graph, functional, undefined)
    ]
    names = ("forward", "backward")
    guards: list[SizeExpression] = least_sizes(record.dimensions)
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


def with_partition(program: EncodedProgram) -> EncodedProgram:
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


def _subgraphs(graph: Graph, functional: FunctionalGraph, undefined: Sequence[int]) -> list[Subgraph]:
    """Return the forward and backward for a call in which every gradient is wanted, or the whole inference graph."""
    gradients = functional.gradients
    if gradients is None:
        return [Subgraph([value.name for value in graph.inputs], list(graph.nodes), graph.outputs)]
    needed = [index is not None for index in gradients.of_inputs]
    partitioned = partition_graph(graph, functional, gradients.partitions[-1], needed, impure_nodes(graph))
    defined = [index not in undefined for index in range(len(gradients.tangents))]
    return [partitioned.forward, with_tangents(graph, partitioned.backward, defined)]
