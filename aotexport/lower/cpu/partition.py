"""A subgraph of a functional graph to a shared library."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import sympy
import torch

from aotexport.errors import ExportFailed
from aotexport.lower.targets import Level
from aotexport.torch_internals.calls import FakeTensorMode
from aotexport.torch_internals.compiler import compile_library, symbolic_sizes, trace_decomposed
from aotexport.torch_internals.names import ShapeEnv
from aotexport.values.sizes import encode_size
from aotexport_runtime.execution.codegen import Environment, compile_graph
from aotexport_runtime.rewrite.names import operands, random_nodes
from aotexport_runtime.rewrite.partition import Subgraph
from aotexport_runtime.schema.graph import Graph
from aotexport_runtime.schema.program import Program, SizeInput
from aotexport_runtime.schema.sizes import SizeExpression
from aotexport_runtime.schema.targets import CompiledHalf
from aotexport_runtime.schema.values import NothingMeta, SizeMeta, TensorMeta, ValueMeta
from aotexport_runtime.validate.arguments import metas_of, references
from aotexport_runtime.values import dtypes
from aotexport_runtime.values.sizes import evaluate


class NotLowered(ExportFailed):
    """A subgraph that is not compiled; the message says why."""


@dataclass(frozen=True)
class Piece:
    """A subgraph to compile: the whole functional graph, its forward or its backward.

    `sizes` are the values of symbols in the example call, `namespaces` those of custom operators; `written` has the
    inputs that the library writes, each with the value that it gets.
    """

    graph: Graph
    subgraph: Subgraph
    program: Program
    sizes: Mapping[str, int]
    namespaces: frozenset[str]
    written: Mapping[str, str]

    @property
    def operands(self) -> set[str]:
        """Values that operators of the subgraph take."""
        return {name for node in self.subgraph.nodes for name in operands(node)}


def lower_subgraph(piece: Piece, level: Level, file: str, directory: Path) -> tuple[CompiledHalf, list[SizeExpression]]:
    """Compile `piece` to the library `file` in `directory`, which gets no other file.

    Returns its record, and the compiler's assumptions about the symbols. `NotLowered`: it has operators or results that
    a library cannot have.
    """
    _check_effects(piece)
    metas, subgraph = metas_of(piece.graph), piece.subgraph
    used = piece.operands
    inputs = [name for name in subgraph.inputs if name in used and isinstance(metas[name], TensorMeta)]
    written = {name: value for name, value in piece.written.items() if name in inputs}
    results = [*_results(piece, written), *written.values()]
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
        found = function([by_name[n] if n in by_name else _size(n, piece, known) for n in subgraph.inputs], known)
        for name, value in zip(written, found[len(found) - len(written) :], strict=True):
            by_name[name].copy_(value)
        return found[: len(found) - len(written)]

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
    returned = results[: len(results) - len(written)]
    library = CompiledHalf(
        file=file, inputs=tuple(inputs), results=tuple(returned), indexes=indexes, written=tuple(written)
    )
    return library, _assumptions(mode.shape_env, names)


def _check_effects(piece: Piece) -> None:
    uses = piece.operands.union(*map(references, piece.subgraph.outputs))
    random = random_nodes(piece.graph)
    for node in piece.subgraph.nodes:
        if isinstance(node.meta, NothingMeta):
            raise NotLowered(f"`{node.op}` only checks for errors, which a compiler leaves out")
        if node.name in random and node.name not in uses:
            raise NotLowered(f"`{node.op}` only advances the random state, which a compiler leaves out")


def _results(piece: Piece, written: Mapping[str, str]) -> list[str]:
    """Return the tensors that the library returns; refuse results that only it would know, and that are no tensors."""
    metas = metas_of(piece.graph)
    computed = {node.name for node in piece.subgraph.nodes}
    found: dict[str, None] = {}
    mutations = len(piece.program.functional.mutations) if written and piece.program.functional is not None else 0
    new = [output for output in piece.subgraph.outputs[:mutations] if output not in written.values()]
    for output in [*new, *piece.subgraph.outputs[mutations:]]:
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
    meta = metas_of(piece.graph)[name]
    value = meta.value if isinstance(meta, SizeMeta) else None
    return None if value is None else evaluate(value, symbols)


def _assumptions(environment: ShapeEnv | None, names: Mapping[Any, sympy.Symbol]) -> list[SizeExpression]:
    """Return what a trace and the compiler assume, over `names` of symbols; refuse what the format cannot hold."""
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


aten = torch.ops.aten

_ALONG_AN_AXIS = (
    aten.gather.default,
    aten.scatter.src,
    aten.scatter.value,
    aten.scatter.reduce,
    aten.scatter.value_reduce,
    aten.scatter_add.default,
    aten.scatter_reduce.two,
)
"""Operators `(operand, axis, index, ...)`, whose indices are never negative."""

_BY_SEVERAL = (aten.index.Tensor, aten.index_put.default)
"""Operators `(operand, indices, ...)`, whose negative indices count from the end."""


def hold_indices(module: torch.fx.GraphModule, fake_mode: FakeTensorMode) -> bool:
    """Clamp the indices in a traced graph, and return one more result that says whether any was outside of its bounds.

    The module is changed. Returns whether it has such indices; if not, there is no further result.
    """
    outside_bounds: list[torch.fx.Node] = []
    for node in list(module.graph.nodes):
        if node.op != "call_function":
            continue
        call = _Inserter(module.graph, node, fake_mode)
        for position, place, axis, wraps in _indices(node):
            operand: Any = node.args[0]
            index: Any = node.args[position] if place is None else node.args[position][place]  # type: ignore[index]
            clamped = _clamped(call, operand, index, axis, wraps)
            outside_bounds.append(call(aten.any.dims, call(aten.ne.Tensor, clamped, index)))
            if place is None:
                node.update_arg(position, clamped)
            else:
                indices: Any = list(node.args[position])  # type: ignore[call-overload]
                indices[place] = clamped
                node.update_arg(position, indices)
    if not outside_bounds:
        return False
    (output,) = module.graph.find_nodes(op="output")
    writes = module.graph.find_nodes(op="call_function", target=aten.copy_.default)
    call = _Inserter(module.graph, writes[0] if writes else output, fake_mode)
    outside = outside_bounds[0]
    for other in outside_bounds[1:]:
        outside = call(aten.logical_or.default, outside, other)
    output.update_arg(0, (*output.args[0], outside))
    for write in writes:
        # The graph, which then runs, finds what was there before.
        keeping = _Inserter(module.graph, write, fake_mode)
        write.update_arg(1, keeping(aten.where.self, outside, write.args[0], write.args[1]))
    module.recompile()
    return True


def _indices(node: torch.fx.Node) -> Iterator[tuple[int, int | None, int, bool]]:
    """Yield, per tensor of indices: position of the argument, place in it, axis of the operand, whether it may wrap."""
    operand: Any = node.args[0] if node.args else None
    if node.target is aten.embedding.default:
        yield 1, None, 0, False
    elif node.target in _ALONG_AN_AXIS:
        axis: Any = node.args[1]
        rank = operand.meta["val"].dim()
        if rank:
            yield 2, None, axis % rank, False
    elif node.target in _BY_SEVERAL:
        indices: Any = node.args[1]
        for place, index in enumerate(indices):
            if index is not None and index.meta["val"].dtype not in (torch.bool, torch.uint8):
                yield 1, place, place, True


def _clamped(call: _Inserter, operand: Any, index: Any, axis: int, wraps: bool) -> torch.fx.Node:
    size: Any = operand.meta["val"].shape[axis]
    low, high = (-size if wraps else 0, max(size - 1, 0)) if isinstance(size, int) else (0, 0)
    if not isinstance(size, int):
        size = call(aten.sym_size.int, operand, axis)
        low, high = call(operator.neg, size) if wraps else 0, call(operator.sub, size, 1)
    return call(aten.clamp_max.default, call(aten.clamp_min.default, index, low), high)


class _Inserter:
    def __init__(self, graph: torch.fx.Graph, before: torch.fx.Node, fake_mode: FakeTensorMode) -> None:
        self._graph = graph
        self._before = before
        self._mode = fake_mode

    def __call__(self, target: Callable[..., Any], *args: Any) -> torch.fx.Node:
        with self._graph.inserting_before(self._before):
            node = self._graph.call_function(target, args)
        values = [argument.meta["val"] if isinstance(argument, torch.fx.Node) else argument for argument in args]
        with self._mode:
            node.meta["val"] = target(*values)
        return node
