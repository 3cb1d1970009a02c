"""A subgraph of a functional graph to a shared library."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import sympy
import torch

from aotexport.errors import ExportFailed
from aotexport.lower.cpu.indices import hold_indices
from aotexport.lower.cpu.levels import Level
from aotexport.torch_internals.compiler import compile_library, symbolic_sizes, trace_decomposed
from aotexport.torch_internals.names import ShapeEnv
from aotexport.values.sizes import encode_size
from aotexport_runtime.engines.codegen import Environment, compile_graph
from aotexport_runtime.engines.impure import random_nodes
from aotexport_runtime.engines.partition import Subgraph
from aotexport_runtime.schema.compiled import CompiledHalf
from aotexport_runtime.schema.graph import Graph
from aotexport_runtime.schema.program import Program, SizeInput
from aotexport_runtime.schema.sizes import Dimension, Size, SizeExpression
from aotexport_runtime.schema.values import NothingMeta, SizeMeta, TensorMeta, ValueMeta
from aotexport_runtime.validate import references
from aotexport_runtime.values import dtypes
from aotexport_runtime.values.sizes import evaluate


class NotLowered(ExportFailed):
    """A subgraph that is not compiled; the message says why."""


@dataclass(frozen=True)
class Piece:
    """A subgraph to compile.

    Attributes:
        graph: the functional graph.
        subgraph: the whole graph, its forward or its backward.
        program: whose graph it is.
        sizes: value per symbol in the example call.
        namespaces: namespaces of custom operators.
    """

    graph: Graph
    subgraph: Subgraph
    program: Program
    sizes: Mapping[str, int]
    namespaces: frozenset[str]

    @property
    def metas(self) -> dict[str, ValueMeta]:
        """Metadata of every value of the graph."""
        return {value.name: value.meta for value in (*self.graph.inputs, *self.graph.nodes)}


def lower_subgraph(piece: Piece, level: Level, file: str, directory: Path) -> tuple[CompiledHalf, list[SizeExpression]]:
    """Compile `piece` to the library `file` in `directory`.

    Args:
        piece: the subgraph.
        level: instruction set.
        file: name of the library.
        directory: gets the library and no other file.

    Returns:
        Its record, and the compiler's assumptions about the symbols.

    Raises:
        NotLowered: it has operators or results that a library cannot have.
    """
    _check_effects(piece)
    metas, subgraph = piece.metas, piece.subgraph
    used = {name for node in subgraph.nodes for a in (*node.args, *node.kwargs.values()) for name in references(a)}
    inputs = [name for name in subgraph.inputs if name in used and isinstance(metas[name], TensorMeta)]
    results = _results(piece)
    dimensions = piece.program.dimensions
    if any(piece.sizes[dimension.symbol] < 2 for dimension in dimensions):
        raise NotLowered("a dynamic size is 0 or 1 in the example call, which the compiler takes for a constant")
    mode, symbols = symbolic_sizes({d.symbol: (piece.sizes[d.symbol], d.max) for d in dimensions})
    # Assumptions replace symbols in the sizes themselves.
    names = {size.node.expr: sympy.Symbol(symbol, integer=True) for symbol, size in symbols.items()}
    with mode:
        fakes = [_fake(metas[name], symbols) for name in inputs]
        carrier = [torch.empty([*symbols.values(), 0])] if symbols else []
    function = compile_graph(
        piece.graph,
        subgraph.nodes,
        subgraph.inputs,
        results,
        Environment(piece.namespaces),
        label="subgraph to compile",
    )

    def run(*tensors: Any) -> tuple[Any, ...]:
        # The sizes come in as those of a tensor without elements.
        known = dict(zip(symbols, tensors[0].shape, strict=False)) if symbols else {}
        by_name = dict(zip(inputs, tensors[len(carrier) :], strict=True))
        return function([by_name[n] if n in by_name else _size(n, piece, known) for n in subgraph.inputs], known)

    module = trace_decomposed(run, [*carrier, *fakes], mode)
    indexes = hold_indices(module, mode)
    compile_library(
        module,
        [*carrier, *fakes],
        mode,
        directory / file,
        march=level.march,
        vector_nbits=level.vector_nbits,
        ordered=bool(random_nodes(piece.graph)),
        header=(Path(__file__).parent / "matmul.h").read_text(),
    )
    library = CompiledHalf(file=file, inputs=tuple(inputs), results=tuple(results), indexes=indexes)
    return library, _assumptions(mode.shape_env, names)


def _check_effects(piece: Piece) -> None:
    uses = {
        name for node in piece.subgraph.nodes for a in (*node.args, *node.kwargs.values()) for name in references(a)
    }
    uses |= {name for output in piece.subgraph.outputs for name in references(output)}
    random = random_nodes(piece.graph)
    for node in piece.subgraph.nodes:
        if isinstance(node.meta, NothingMeta):
            raise NotLowered(f"`{node.op}` only checks for errors, which a compiler leaves out")
        if node.name in random and node.name not in uses:
            raise NotLowered(f"`{node.op}` only advances the random state, which a compiler leaves out")


def _results(piece: Piece) -> list[str]:
    """Return the tensors that the library returns.

    Raises:
        NotLowered: the subgraph returns something that only the library would know, and that is no tensor.
    """
    metas = piece.metas
    computed = {node.name for node in piece.subgraph.nodes}
    found: dict[str, None] = {}
    for output in piece.subgraph.outputs:
        for name in references(output):
            meta = metas[name]
            if not isinstance(output, str) or not isinstance(meta, TensorMeta | SizeMeta):
                raise NotLowered("it passes on something that is neither a tensor nor a size")
            if isinstance(meta, SizeMeta) and meta.value is None and name in computed:
                raise NotLowered("it passes on a size that only the data know")
            if isinstance(meta, TensorMeta) and name in computed:
                found[name] = None
    if not found:
        raise NotLowered("it computes nothing")
    return list(found)


def _fake(meta: ValueMeta, symbols: Mapping[str, Any]) -> torch.Tensor:
    assert isinstance(meta, TensorMeta)
    if meta.device != "cpu":
        raise NotLowered(f"it was captured on {meta.device}")
    shape = [evaluate(size, symbols) for size in meta.shape]
    stride = [evaluate(step, symbols) for step in meta.stride]
    return torch.empty_strided(shape, stride, dtype=dtypes.dtype(meta.dtype))


def _size(name: str, piece: Piece, symbols: Mapping[str, Any]) -> Any:
    """Return an input of the subgraph that is no tensor, or a tensor that it does not use."""
    for value, spec in zip(piece.graph.inputs, piece.program.inputs, strict=False):
        if value.name == name and isinstance(spec, SizeInput):
            return symbols[spec.symbol]
    meta = piece.metas[name]
    value = meta.value if isinstance(meta, SizeMeta) else None
    return None if value is None else evaluate(value, symbols)


def _assumptions(environment: ShapeEnv | None, names: Mapping[Any, sympy.Symbol]) -> list[SizeExpression]:
    """Return the assumptions of a trace and the compiler about the symbols.

    Args:
        environment: shape environment of the trace.
        names: the program's symbol per symbol of the trace.

    Raises:
        NotLowered: the format cannot express an assumption.
    """
    if environment is None:
        return []
    found: list[SizeExpression] = []
    for guard in environment.guards:
        expression: Any = guard.expr
        if expression in (sympy.true, True):
            continue
        known = expression.free_symbols <= names.keys()
        record = encode_size(expression.xreplace(names), or_none=True) if known else None
        if record is None:
            raise NotLowered(f"the compiler assumes `{expression}`, which a bundle cannot hold")
        if isinstance(record, SizeExpression) and record not in found:
            found.append(record)
    return found


def least_sizes(dimensions: Sequence[Dimension]) -> list[SizeExpression]:
    """Return the assumption of every trace that dynamic sizes are neither 0 nor 1."""
    two: Size = 2
    return [SizeExpression(op="le", args=(two, d.symbol)) for d in dimensions if (d.min or 0) < 2]
