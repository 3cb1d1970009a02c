"""Values of forward that backward computes again before their first use, so that forward saves less.

Nodes that draw random numbers or read inputs that the program changes are never recomputed.
"""

from __future__ import annotations

import dataclasses
import heapq
import math
from collections.abc import Mapping, Sequence, Set

from msgspec.structs import replace

from aotexport_runtime.rewrite.names import operands, renamed, writes_in_place
from aotexport_runtime.rewrite.partition import VIEWS, PartitionedGraph, Subgraph
from aotexport_runtime.rewrite.reuse import IN_PLACE
from aotexport_runtime.rewrite.updates import UPDATE
from aotexport_runtime.schema.graph import Graph, Node
from aotexport_runtime.schema.program import FunctionalGraph, Partition
from aotexport_runtime.schema.values import Argument, NothingMeta, SequenceMeta, TensorMeta, ValueMeta
from aotexport_runtime.validate.arguments import descendants
from aotexport_runtime.values import dtypes, sizes

_MATMULS = frozenset(
    f"aten::{name}"
    for name in (
        *("mm.default", "addmm.default", "bmm.default", "baddbmm.default", "linear.default", "convolution.default"),
        "_scaled_dot_product_flash_attention_for_cpu.default",
    )
)

_MULTIPLICATIONS_PER_MOVE = 50
"""Multiplications in the time that an element-wise operator takes for an element, which memory bounds."""


def within_budget(
    graph: Graph,
    functional: FunctionalGraph,
    partition: Partition,
    budget: float,
    symbols: Mapping[str, int],
    once: Set[str],
) -> Partition:
    """Return `partition` without values that backward then computes again.

    `budget`: most memory of the saved values, as a part of those of `partition`; exceeded where too little can go.
    `symbols`: value per symbol, for the sizes of tensors. `once`: nodes that run once, in forward.
    """
    mutated = {graph.inputs[mutation.input_index].name for mutation in functional.mutations}
    count = len(functional.gradients.of_inputs) if functional.gradients else 0
    primals = {value.name for value in graph.inputs[:count]}
    values = _Values(graph, symbols, once, set(partition.saved), primals - mutated)
    nbytes = {name: values.nbytes(name) for name in partition.saved if name in values.nodes}
    excess = sum(nbytes.values()) * (1 - budget)
    candidates = [name for name in nbytes if nbytes[name] and name not in partition.unchecked]
    queue = [(0.0, index, name) for index, name in enumerate(candidates)]
    while queue and excess > 0:
        _, index, name = heapq.heappop(queue)
        needed = values.needed_for(name)
        if needed is None:
            continue
        price = sum(map(values.cost, needed - values.recomputed)) / nbytes[name]
        # Values dropped since this one was queued may have made it dearer.
        if queue and price > queue[0][0]:
            heapq.heappush(queue, (price, index, name))
            continue
        values.saved.remove(name)
        values.recomputed |= needed
        excess -= nbytes[name]
    saved = tuple(name for name in partition.saved if name in values.saved)
    return Partition(name="within-budget", saved=saved, unchecked=partition.unchecked)


class _Values:
    """The values of a joint graph: which are saved or `recomputed`, and the cost of computing the others."""

    def __init__(
        self, graph: Graph, symbols: Mapping[str, int], once: Set[str], saved: set[str], inputs: set[str]
    ) -> None:
        self.symbols, self.once, self.saved, self.inputs = symbols, once, saved, inputs
        self.recomputed = set[str]()
        self.nodes = {node.name: node for node in graph.nodes}
        self.metas: dict[str, ValueMeta] = {value.name: value.meta for value in (*graph.inputs, *graph.nodes)}

    def needed_for(self, name: str) -> set[str] | None:
        """Return the nodes that compute `name` from saved values and inputs; None: it cannot be computed again."""
        found: set[str] = set()
        pending = [name]
        while pending:
            node = self.nodes.get(pending.pop())
            if node is None or node.name in self.once or isinstance(node.meta, NothingMeta):
                return None
            if not node.op.startswith("aten::") and node.op != "python::getitem":
                return None
            found.add(node.name)
            taken = set(operands(node)) - found - self.inputs
            pending += [other for other in taken if other not in self.saved or other not in self.nodes]
        return found

    def nbytes(self, name: str) -> int:
        """Return the size of a value in bytes, 0 for numbers."""
        meta = self.metas[name]
        return nbytes_of(meta, self.symbols) if isinstance(meta, TensorMeta) else 0

    def cost(self, name: str) -> float:
        """Return the cost of a node, in elements of an element-wise operator."""
        node = self.nodes[name]
        if node.op == "python::getitem" or node.op in VIEWS:
            return 0
        out = numel_of(node.meta, self.symbols)
        operands = [numel_of(self.metas[a], self.symbols) for a in node.args if isinstance(a, str)]
        if node.op not in _MATMULS or len(operands) < 2 or not out:
            return out + sum(operands)
        factors = operands[-2:] if "addmm" in node.op or "baddbmm" in node.op else operands[:2]
        # Of matrices m x k and k x n, the length of the sums: k.
        return out * math.sqrt(factors[0] * factors[1] / out) / _MULTIPLICATIONS_PER_MOVE


def numel_of(meta: ValueMeta, symbols: Mapping[str, int]) -> int:
    """Return the number of elements of a value; 0 for numbers, and where a size is of other symbols or of data."""
    if isinstance(meta, SequenceMeta):
        return sum(numel_of(item, symbols) for item in meta.items)
    if not isinstance(meta, TensorMeta) or any(not sizes.symbols_of(size) <= symbols.keys() for size in meta.shape):
        return 0
    return math.prod(sizes.evaluate(size, symbols) for size in meta.shape)


def nbytes_of(meta: ValueMeta, symbols: Mapping[str, int]) -> int:
    """Return the bytes of the elements of a value, as `numel_of` counts them."""
    if isinstance(meta, SequenceMeta):
        return sum(nbytes_of(item, symbols) for item in meta.items)
    return numel_of(meta, symbols) * dtypes.dtype(meta.dtype).itemsize if isinstance(meta, TensorMeta) else 0


def computed_late(partitioned: PartitionedGraph) -> PartitionedGraph:
    """Return `partitioned` with nodes of backward that depend on saved values alone moved before their first use."""
    subgraph = partitioned.backward
    tangents = set(subgraph.inputs[len(subgraph.inputs) - len(partitioned.reaching) :])
    own = descendants(subgraph.nodes, tangents)
    waiting = {node.name: node for node in subgraph.nodes if node.name not in own}
    places = {name: index for index, name in enumerate(waiting)}
    nodes: list[Node] = []
    for node in subgraph.nodes:
        if node.name not in own:
            continue
        found: list[Node] = []
        pending = operands(node)
        while pending:
            if (taken := waiting.pop(pending.pop(), None)) is not None:
                found.append(taken)
                pending += operands(taken)
        nodes += [*sorted(found, key=lambda taken: places[taken.name]), node]
    nodes += waiting.values()
    return dataclasses.replace(partitioned, backward=Subgraph(subgraph.inputs, nodes, subgraph.outputs))


_CHEAP = frozenset((*IN_PLACE, "aten::pow.Tensor_Scalar", "aten::native_layer_norm.default"))
"""Operators whose time is that of reading and writing memory."""


def computed_again(nodes: Sequence[Node], loss: str) -> list[Node]:
    """Return the nodes of a step with cheap values of forward, which ends at `loss`, computed again in backward.

    They are those whose operands backward reads later anyway: memory goes down, and what is read is near.
    """
    by_name = {node.name: node for node in nodes}
    end = next((index for index, node in enumerate(nodes, 1) if node.name == loss), len(nodes))
    forward, bases = {node.name for node in nodes[:end]}, dict[str, str]()
    read, written = dict[str, list[int]](), dict[str, int]()
    for index, node in enumerate(nodes):
        taken = [bases.get(name, name) for name in operands(node)]
        writes = writes_in_place(node.op) or node.op == UPDATE
        is_alias = writes or node.op in VIEWS or node.op == "python::getitem"
        bases[node.name] = taken[0] if is_alias and taken else node.name
        for name in taken:
            if index >= end:
                read.setdefault(name, []).append(index)
            if writes:
                written.setdefault(name, index)

    def is_cheap(name: str) -> bool:
        first = read[name][0]
        taken = [bases.get(each, each) for each in operands(by_name[name])]
        return by_name[name].op in _CHEAP and all(
            read.get(each, [0])[-1] >= first and written.get(each, len(nodes)) > first for each in taken
        )

    cheap = {name for name in read.keys() & forward - written.keys() if bases[name] == name and is_cheap(name)}
    made, names = list(nodes[:end]), dict[str, Argument]()

    def add(name: str) -> None:
        if name in forward and bases[name] in cheap and name not in names:
            for each in operands(by_name[name]):
                add(each)
            names[name] = f"{name}:again"
            made.append(replace(renamed(by_name[name], names), name=f"{name}:again"))

    for node in nodes[end:]:
        for name in operands(node):
            add(name)
        made.append(renamed(node, names))
    return made
