"""The memory of a call over its nodes, by what it holds, as `target="portable"` runs the graphs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from aotexport_runtime.allowed.signatures import signature_of
from aotexport_runtime.bundle.read import Bundle
from aotexport_runtime.execution.functional_graph import rewritten
from aotexport_runtime.execution.source import line_of, origin_of
from aotexport_runtime.rewrite.names import impure_nodes, last_uses, names_in, operands, writes_in_place
from aotexport_runtime.rewrite.partition import (
    VIEWS,
    Subgraph,
    ancestors,
    forward_returns,
    partition_graph,
    views_recomputed,
)
from aotexport_runtime.rewrite.recompute import computed_late, nbytes_of, within_budget
from aotexport_runtime.schema.graph import Graph, Node
from aotexport_runtime.schema.program import FunctionalGraph, Program, StateInput
from aotexport_runtime.schema.values import TensorMeta, ValueMeta
from aotexport_runtime.validate.arguments import metas_of

CATEGORIES = ("weights", "inputs", "outputs", "saved for backward", "temporary", "gradients")
"""What memory holds, in the order of the picture, from below."""


@dataclass(frozen=True)
class Saved:
    """Values that forward keeps for backward, of one line and module."""

    line: str
    module: str
    nbytes: int
    count: int


@dataclass(frozen=True)
class Timeline:
    """The memory of a call: after each node, in bytes, per category of `CATEGORIES`.

    Attributes:
        program: its name.
        symbols: value of each dimension, by name.
        nbytes: a row per node of forward, then of backward.
        forward: number of rows of forward.
        saved: what forward keeps for backward, weights and inputs apart, the largest first.
        recomputed: per part of the saved memory that may stay (`memory_budget`): bytes saved and peak.
    """

    program: str
    symbols: Mapping[str, int]
    nbytes: list[list[int]]
    forward: int
    saved: list[Saved]
    recomputed: dict[float, tuple[int, int]] = field(default_factory=dict[float, tuple[int, int]])

    @property
    def peak(self) -> int:
        """The most memory after any node."""
        return max(map(sum, self.nbytes), default=0)


def timeline(bundle: Bundle, program: Program, symbols: Mapping[str, int]) -> Timeline | None:
    """Return the memory of a call of `program`; None: it has a forward graph alone, whose memory autograd decides.

    `symbols`: value of each dimension, by symbol.
    """
    functional = program.functional
    if functional is None:
        return None
    graph = bundle.graph(program.name, functional.file)
    names = {each.symbol: each.name for each in program.dimensions}
    shown = {names[symbol]: value for symbol, value in symbols.items()}
    if functional.gradients is None:
        inputs = [value.name for value in graph.inputs]
        nodes, _ = ancestors(graph.nodes, graph.outputs, set(inputs), also=impure_nodes(graph))
        piece = rewritten(graph, Subgraph(inputs, nodes, graph.outputs))
        return Timeline(program.name, shown, _Memory(graph, program, symbols).run(piece, {}), len(piece.nodes), [])
    first, saved = _step(graph, program, functional, symbols, 1)
    found = Timeline(program.name, shown, *first, _by_line(graph, saved, symbols))
    for budget in (0.5, 0.0):
        (rows, _), kept = _step(graph, program, functional, symbols, budget)
        nbytes = sum(each.nbytes for each in _by_line(graph, kept, symbols))
        found.recomputed[budget] = nbytes, max(map(sum, rows), default=0)
    return found


def _step(
    graph: Graph, program: Program, functional: FunctionalGraph, symbols: Mapping[str, int], budget: float
) -> tuple[tuple[list[list[int]], int], list[str]]:
    """Return the rows of forward and backward with the number of forward's, and the names of the saved values."""
    gradients, impure = functional.gradients, impure_nodes(graph)
    assert gradients is not None
    partition = views_recomputed(graph, functional, gradients.partitions[0])
    if budget < 1:
        partition = within_budget(graph, functional, partition, budget, symbols, impure)
    needed = [index is not None for index in gradients.of_inputs]
    parts = partition_graph(graph, functional, partition, needed, impure)
    parts = parts if budget == 1 else computed_late(parts)
    returns = forward_returns(functional)
    forward = rewritten(graph, parts.forward, visible=returns)
    saved = names_in(forward.outputs[returns:])
    memory = _Memory(graph, program, symbols)
    rows = memory.run(forward, dict.fromkeys(saved, "saved for backward"))
    # The results stay with the caller; tangents of them come, and every gradient goes to its tensor.
    backward = rewritten(graph, parts.backward)
    memory.pinned.update(names_in(forward.outputs[:returns]))
    rows += memory.run(backward, dict.fromkeys(names_in(backward.outputs), "gradients"))
    return (rows, len(forward.nodes)), saved


class _Memory:
    """Allocations, each with the values that lie in it.

    Attributes:
        pinned: values that stay to the end.
    """

    def __init__(self, graph: Graph, program: Program, symbols: Mapping[str, int]) -> None:
        """Begin with the weights and inputs of a call."""
        self.graph, self.symbols = graph, symbols
        self.metas: dict[str, ValueMeta] = metas_of(graph)
        self.storage: dict[str, str] = {}
        self.nbytes: dict[str, int] = {}
        self.category: dict[str, str] = {}
        self.pinned = set[str]()
        for value, spec in zip(graph.inputs, _parts(program), strict=False):
            self.allocate(value.name, "weights" if spec else "inputs")
            self.pinned.add(value.name)

    def allocate(self, name: str, category: str) -> None:
        """Give a value memory of its own."""
        self.storage[name] = name
        self.nbytes[name] = nbytes_of(self.metas[name], self.symbols)
        self.category[name] = category

    def run(self, piece: Subgraph, kept: Mapping[str, str]) -> list[list[int]]:
        """Return a row per node; `kept`: category of values that the piece returns, others are outputs."""
        for name in piece.inputs:
            if name not in self.storage:  # tangents
                self.allocate(name, "temporary")
        uses = last_uses(piece.nodes, piece.outputs)
        dying: dict[int, list[str]] = {}
        for name, index in uses.items():
            dying.setdefault(index, []).append(name)
        category = {name: kept.get(name, "outputs") for name in names_in(piece.outputs)}
        self.free(set(self.storage) - uses.keys())
        rows: list[list[int]] = []
        for index, node in enumerate(piece.nodes):
            self.metas[node.name] = node.meta
            self.place(node, category.get(node.name, "temporary"))
            rows.append(self.row())
            self.free({*dying.get(index, ()), *([] if node.name in uses else [node.name])})
        return rows

    def place(self, node: Node, category: str) -> None:
        """Give the result of a node memory: an operand's, where it is a view of it or written over it."""
        base = next((name for name in _shared_with(node, self.graph) if name in self.storage), None)
        if base is None:
            self.allocate(node.name, category)
        else:
            self.storage[node.name] = root = self.storage[base]
            if category != "temporary" and self.category[root] == "temporary":
                self.category[root] = category

    def free(self, names: Iterable[str]) -> None:
        """Forget values; memory in which none lies any more is free."""
        for name in names:
            if name not in self.pinned:
                self.storage.pop(name, None)

    def row(self) -> list[int]:
        """Return the bytes per category now."""
        live = set(self.storage.values())
        found = Counter[str]()
        for root in live:
            found[self.category[root]] += self.nbytes[root]
        return [found[category] for category in CATEGORIES]


def _parts(program: Program) -> Iterator[bool]:
    """Yield per input of a functional graph whether it is of the module's state."""
    for spec in program.inputs:
        for _ in getattr(spec, "parts", ()) or (spec,):
            yield isinstance(spec, StateInput)


def _shared_with(node: Node, graph: Graph) -> Sequence[str]:
    """Return the operands in whose memory the result of a node may lie, the first one first."""
    if writes_in_place(node.op) or node.op in VIEWS or node.op in ("aten::reshape.default", "python::getitem"):
        return operands(node)[:1]
    for keyword in ("out", "grad_input"):
        if isinstance(written := node.kwargs.get(keyword), str):
            return [written]
    signature = signature_of(graph.schemas.get(node.op, ""))
    views = [] if signature is None else [i for i, each in enumerate(signature.positional) if each.alias]
    return [name for i in views if i < len(node.args) and isinstance(name := node.args[i], str)]


def _by_line(graph: Graph, saved: Iterable[str], symbols: Mapping[str, int]) -> list[Saved]:
    nodes = {node.name: node for node in graph.nodes}
    found: dict[tuple[str, str], list[int]] = {}
    for name in saved:
        node = nodes.get(name)
        if node is not None and isinstance(node.meta, TensorMeta):
            origin = origin_of(node, graph)
            found.setdefault((line_of(origin), origin.module or ""), []).append(nbytes_of(node.meta, symbols))
    rows = [Saved(line, module, sum(each), len(each)) for (line, module), each in found.items()]
    return sorted(rows, key=lambda row: -row.nbytes)
