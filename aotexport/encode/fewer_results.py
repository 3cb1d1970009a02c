"""The inference graph of a call without labels, taken from that of the call with them.

Where the forward graph of the one is that of the other without some results, so is its functional graph: AOTAutograd
gives each operator of a forward graph the same operators, whatever else reads its results.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

import msgspec

from aotexport.encode.program import FORWARD_FILE, EncodedProgram
from aotexport_runtime.engines.impure import impure_nodes
from aotexport_runtime.engines.preconditions.dataflow import writes_nothing
from aotexport_runtime.schema.graph import Graph, GraphInput, Node
from aotexport_runtime.schema.program import FreshOutput, FunctionalGraph, Program
from aotexport_runtime.schema.sizes import Dimension, SizeExpression
from aotexport_runtime.schema.values import Argument, SequenceMeta, SizeMeta, TensorMeta, ValueMeta
from aotexport_runtime.validate import references
from aotexport_runtime.values.sizes import symbols_of


def with_functional_of(whole: EncodedProgram, part: EncodedProgram) -> EncodedProgram | None:
    """Return a program with the inference graph of another one that computes more.

    Args:
        whole: the program that computes more, with its inference graph.
        part: the program, with its forward graph alone.

    Returns:
        The program, or None where the other is not known to compute the same beside further results: it changes inputs,
        its results share memory, its sizes are others, or it computes other values.
    """
    functional = whole.record.functional
    symbols = _symbols(whole.record, part.record)
    if functional is None or symbols is None or not _is_plain(functional):
        return None
    own = part.graphs[FORWARD_FILE]
    kept = _outputs_of(own, _renamed_graph(whole.graphs[FORWARD_FILE], symbols))
    if kept is None or not all(symbols_of(guard) <= symbols.keys() for guard in functional.guards):
        return None
    guards = (_renamed_size(guard, symbols) for guard in functional.guards)
    graph = _renamed_graph(whole.graphs[functional.file], symbols)
    inputs = {value.name for value in own.inputs}
    graph = _with_outputs(graph, [graph.outputs[index] for index in kept], inputs)
    if [value.name for value in graph.inputs] != [value.name for value in own.inputs]:
        return None
    functional = msgspec.structs.replace(
        functional,
        outputs=tuple(functional.outputs[index] for index in kept),
        guards=tuple(guard for guard in guards if guard not in part.record.guards),
    )
    return dataclasses.replace(
        part,
        record=msgspec.structs.replace(part.record, functional=functional),
        graphs={**part.graphs, functional.file: graph},
    )


def _is_plain(functional: FunctionalGraph) -> bool:
    """Return whether the epilogue of an inference graph returns its results, and does nothing else."""
    known = FunctionalGraph(
        file=functional.file,
        outputs=functional.outputs,
        guards=functional.guards,
        deterministic=functional.deterministic,
    )
    return functional == known and all(isinstance(output, FreshOutput) for output in functional.outputs)


def _symbols(whole: Program, part: Program) -> dict[str, str] | None:
    """Return the names of the symbols of one program in the other; None: they have other ranges, or other relations."""
    named = {dimension.name: dimension for dimension in whole.dimensions}
    names: dict[str, str] = {}
    for dimension in part.dimensions:
        same = named.get(dimension.name)
        if same is None or _range(same) != _range(dimension):
            return None
        names[same.symbol] = dimension.symbol
    return names if tuple(_renamed_size(guard, names) for guard in whole.guards) == part.guards else None


def _range(dimension: Dimension) -> Dimension:
    return msgspec.structs.replace(dimension, symbol="", input_index=0)


def _outputs_of(part: Graph, whole: Graph) -> list[int] | None:
    """Return where a graph returns the outputs of another one; None: it is not that one with nodes that only read."""
    own = {node.name for node in part.nodes}
    more = [node for node in whole.nodes if node.name not in own]
    inputs = {value.name: value.meta for value in whole.inputs}

    def described(node: Node) -> Node:
        return msgspec.structs.replace(node, source=None, module=None)

    is_same = (
        not (whole.subgraphs or part.subgraphs)
        and [described(node) for node in whole.nodes if node.name in own] == [*map(described, part.nodes)]
        and all(writes_nothing(node.op) for node in more)
        and impure_nodes(whole) <= own
        and all(inputs.get(value.name) == value.meta for value in part.inputs)
        and all(output in whole.outputs for output in part.outputs)
    )
    return [whole.outputs.index(output) for output in part.outputs] if is_same else None


def _with_outputs(graph: Graph, outputs: list[Argument], inputs: Collection[str]) -> Graph:
    """Return a functional graph with some of its outputs, what they need, and some inputs though nothing needs them."""
    needed = {*impure_nodes(graph), *_references(outputs), *inputs}
    for node in reversed(graph.nodes):
        if node.name in needed:
            needed.update(_references([*node.args, *node.kwargs.values()]))
    nodes = [node for node in graph.nodes if node.name in needed]
    sources, modules = _used(node.source for node in nodes), _used(node.module for node in nodes)
    return msgspec.structs.replace(
        graph,
        inputs=tuple(value for value in graph.inputs if value.name in needed),
        nodes=tuple(
            msgspec.structs.replace(
                node,
                source=None if node.source is None else sources[node.source],
                module=None if node.module is None else modules[node.module],
            )
            for node in nodes
        ),
        outputs=outputs,
        schemas={op: schema for op, schema in graph.schemas.items() if op in {node.op for node in nodes}},
        sources=tuple(graph.sources[index] for index in sources),
        modules=tuple(graph.modules[index] for index in modules),
    )


def _references(arguments: Iterable[Argument]) -> Iterator[str]:
    for argument in arguments:
        yield from references(argument)


def _used(indices: Iterable[int | None]) -> dict[int, int]:
    """Return the new index in a table of each index that is used."""
    found = dict.fromkeys(index for index in indices if index is not None)
    return {old: new for new, old in enumerate(found)}


def _renamed_graph(graph: Graph, names: Mapping[str, str]) -> Graph:
    """Return a graph with other names of its symbols."""
    return msgspec.structs.replace(
        graph,
        inputs=tuple(GraphInput(name=value.name, meta=_renamed(value.meta, names)) for value in graph.inputs),
        nodes=tuple(msgspec.structs.replace(node, meta=_renamed(node.meta, names)) for node in graph.nodes),
    )


def _renamed(meta: ValueMeta, names: Mapping[str, str]) -> ValueMeta:
    if isinstance(meta, TensorMeta):
        shape, stride = (tuple(_renamed_size(size, names) for size in sizes) for sizes in (meta.shape, meta.stride))
        return msgspec.structs.replace(meta, shape=shape, stride=stride, offset=_renamed_size(meta.offset, names))
    if isinstance(meta, SequenceMeta):
        return msgspec.structs.replace(meta, items=tuple(_renamed(item, names) for item in meta.items))
    return msgspec.structs.replace(meta, value=_renamed_size(meta.value, names)) if isinstance(meta, SizeMeta) else meta


def _renamed_size(size: Any, names: Mapping[str, str]) -> Any:
    if isinstance(size, SizeExpression):
        return msgspec.structs.replace(size, args=tuple(_renamed_size(item, names) for item in size.args))
    return names.get(size, size) if isinstance(size, str) else size
