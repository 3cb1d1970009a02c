"""Functional graphs to Python functions, with fewer calls and reused memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any

from aotexport_runtime.allowed.operators import aten_signatures
from aotexport_runtime.execution.codegen import Environment, Function, compile_graph
from aotexport_runtime.execution.dropout import DROPOUTS
from aotexport_runtime.execution.matmul.sizes import Mode, is_worth_choosing, matmuls_of
from aotexport_runtime.rewrite.names import LAYER, operands, writes_in_place
from aotexport_runtime.rewrite.partition import Subgraph
from aotexport_runtime.rewrite.reuse import possible_views, reusing
from aotexport_runtime.rewrite.simplify import simplified
from aotexport_runtime.rewrite.updates import UPDATE
from aotexport_runtime.schema.graph import Graph, Node
from aotexport_runtime.schema.values import ValueMeta
from aotexport_runtime.validate.arguments import kind_of
from aotexport_runtime.validate.types import result_dtypes


def compile_functional(
    graph: Graph,
    subgraph: Subgraph,
    environment: Environment,
    *,
    label: str,
    visible: int | None = None,
    in_place: bool = True,
    detached: bool = False,
    layers: Mapping[str, Callable[..., Any]] = MappingProxyType({}),
) -> Function:
    """Return a function that runs `subgraph`, a piece of the functional `graph`, where nothing records gradients.

    `visible`: how many outputs the caller sees, from the first on; None: all. `in_place`: whether calls may write over
    dead operands. `detached`: whether no result may be a view. `layers`: what computes nodes of packed layers, by name.
    Others: see `compile_graph`.
    """
    subgraph = rewritten(graph, subgraph, visible=visible, in_place=in_place)
    metas: dict[str, ValueMeta] = {value.name: value.meta for value in (*graph.inputs, *graph.nodes)}
    views = possible_views(subgraph) if detached else ()
    # Without in-place writes, operands may be batches of function transforms, which oneDNN does not support.
    chooses = in_place and environment.place("cpu").type == "cpu"
    metas.update((node.name, node.meta) for node in subgraph.nodes)
    matmuls = by_onednn(subgraph.nodes, metas, environment.matmul if chooses else "torch")
    dropouts = {node.name: DROPOUTS[node.op] for node in subgraph.nodes if chooses and node.op in DROPOUTS}
    return compile_graph(
        graph,
        subgraph.nodes,
        subgraph.inputs,
        subgraph.outputs,
        environment,
        label=label,
        detached=views,
        replacements={**matmuls, **dropouts, **layers},
    )


def rewritten(graph: Graph, subgraph: Subgraph, *, visible: int | None = None, in_place: bool = True) -> Subgraph:
    """Return `subgraph` with the nodes that run: without calls that change nothing, over operands that are dead."""
    metas: dict[str, ValueMeta] = {value.name: value.meta for value in (*graph.inputs, *graph.nodes)}
    metas.update((node.name, node.meta) for node in subgraph.nodes)
    proven = of_proven_dtype([value.name for value in graph.inputs], [*graph.nodes, *subgraph.nodes], metas)
    writes = any(writes_in_place(node.op) or node.op == UPDATE for node in subgraph.nodes)
    subgraph = simplified(subgraph, metas, proven, writes=writes)
    if not in_place:
        return subgraph
    return reusing(subgraph, proven, visible=len(subgraph.outputs) if visible is None else visible)


def by_onednn(nodes: Iterable[Node], metas: Mapping[str, ValueMeta], mode: Mode) -> dict[str, Callable[..., Any]]:
    """Return the replacement of each matmul of a processor that oneDNN may compute, by the value's name."""
    found: dict[str, Callable[..., Any]] = {}
    for matmul in matmuls_of(nodes, metas) if mode != "torch" else ():
        sizes = matmul.rows, matmul.depth, matmul.columns
        fixed = [size for size in sizes if isinstance(size, int)]
        if len(fixed) < len(sizes) or is_worth_choosing(mode, *fixed):
            from aotexport_runtime.execution.matmul.onednn import replacement

            found[matmul.name] = replacement(matmul.op, mode, [isinstance(size, int) for size in sizes])
    return found


def of_proven_dtype(inputs: Iterable[str], nodes: Iterable[Node], metas: Mapping[str, ValueMeta]) -> set[str]:
    """Return the values whose dtype follows from those of `inputs`, which each call checks."""
    found = set(inputs)
    for node in nodes:
        if node.name in found:
            continue
        schema = aten_signatures().get(node.op.removeprefix("aten::"))
        follows = node.op in ("python::getitem", LAYER) or result_dtypes(node, schema, metas) is not None
        counts = node.op == "aten::arange.default" and kind_of(node.args[0], metas) == "int"
        follows |= counts and getattr(node.meta, "dtype", None) == "int64"
        if follows and found.issuperset(operands(node)):
            found.add(node.name)
    return found
