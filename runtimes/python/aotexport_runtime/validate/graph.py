"""Rules of a graph by itself: single static assignment over names that it may call."""

from __future__ import annotations

import math
import re
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from keyword import iskeyword

from aotexport_runtime.allowed.operators import NAMESPACES, OPERANDS, VIEWS, allowed_aten_operators
from aotexport_runtime.errors import Place
from aotexport_runtime.schema import trees
from aotexport_runtime.schema.bounded import MAX_NODES
from aotexport_runtime.schema.graph import Graph, Node
from aotexport_runtime.schema.limits import DEFAULT, Limits
from aotexport_runtime.schema.values import DTypeArgument, SequenceMeta, TensorMeta, ValueMeta
from aotexport_runtime.validate.arguments import (
    check_argument,
    check_index,
    check_meta,
    graphs_of,
    introduced,
    references,
)
from aotexport_runtime.validate.builtins import Builtins, check_bodies
from aotexport_runtime.validate.declared import check_declared
from aotexport_runtime.validate.trees import check_subclass
from aotexport_runtime.validate.types import check_types, typed_call
from aotexport_runtime.values.trees import leaves


def check_graph(
    graph: Graph,
    symbols: set[str],
    namespaces: set[str],
    *,
    where: Place,
    limits: Limits = DEFAULT,
    has_signatures: bool = True,
    is_cast: bool = False,
) -> None:
    """Refuse a graph that is no single static assignment, has dangling references, or calls forbidden operators.

    `symbols` are its program's, values may introduce others for sizes that depend on data; `namespaces` those of custom
    operators that the manifest declares; `has_signatures`: it must have the signature of every operator that it calls;
    `is_cast`: its program runs under autocast.
    """
    count = sum(len(each.nodes) for each in graphs_of(graph))
    if count > limits.nodes:
        where.refuse(f"{count} nodes; at most {limits.nodes} are read", "bundle-limit/nodes")
    elif check_declared(graph, where):
        _Check(graph, symbols, namespaces, where, limits, has_signatures, is_cast).run()


@dataclass
class _Check:
    """The arguments of `check_graph`, and what the nodes so far have defined."""

    graph: Graph
    symbols: set[str]
    namespaces: set[str]
    where: Place
    limits: Limits
    has_signatures: bool
    is_cast: bool

    def __post_init__(self) -> None:
        is_entered = any(node.op == "torch::enter_autocast" for node in self.graph.nodes)
        # Dtypes in lowered graphs are those of their native code.
        self.is_cast = self.is_cast or not self.has_signatures or is_entered
        self.values: dict[str, ValueMeta] = {}
        self.described = set(self.symbols)
        self.faults = self.where.found
        self.builtins = Builtins(self.values, self.graph.subclasses, self.limits)

    def run(self) -> None:
        graph, where = self.graph, self.where
        self._check_inputs()
        self._check_nodes()
        with where:
            self.builtins.check_closed()
        with where.at("calls") as here:
            _check_calls(graph, self.symbols, here)
        for index, output in enumerate(graph.outputs):
            with where.at("outputs", index) as here:
                check_argument(output, self.values, graph.subgraphs, self.symbols, here)
        with where:
            if where.found == self.faults:
                _check_allocations(graph, self.limits, where)
        for name, subgraph in graph.subgraphs.items():
            replace(self, graph=subgraph, where=where.at("subgraphs", name)).run()

    def _check_inputs(self) -> None:
        for index, record in enumerate(self.graph.subclasses):
            with self.where.at("subclasses", index) as here:
                check_subclass(record, self.symbols, here)
        for index, graph_input in enumerate(self.graph.inputs):
            with self.where.at("inputs", index) as here:
                self.described |= introduced(graph_input.meta)
                check_meta(graph_input.meta, self.described, here)
                _check_new(graph_input.name, self.values, here)
            self.values.setdefault(graph_input.name, graph_input.meta)

    def _check_nodes(self) -> None:
        # Layers repeat their metadata and calls. Hashes of numbers are no secret: a graph could make all alike.
        metas, calls = set[int](), set[Hashable]()
        for index, node in enumerate(self.graph.nodes):
            with self.where.at("nodes", index) as here:
                self._check_node(node, metas, calls, here)
            self.values.setdefault(node.name, node.meta)

    def _check_node(self, node: Node, metas: set[int], calls: set[Hashable], here: Place) -> None:
        graph, values = self.graph, self.values
        check_allowed(node.op, self.namespaces, where=here)
        for kind, arguments in (("args", enumerate(node.args)), ("kwargs", node.kwargs.items())):
            for step, argument in arguments:
                # Most are references to what is there.
                if not (isinstance(argument, str) and argument in values):
                    check_argument(argument, values, graph.subgraphs, self.symbols, here, (kind, step))
        for keyword in node.kwargs:
            is_keyword = keyword.isidentifier() and keyword.isascii() and not iskeyword(keyword)
            message = f"operator `{node.op[:80]}` has a malformed keyword {keyword[:40]!r}"
            here.require(is_keyword, message, "operator-malformed/keyword")
        if not node.op.startswith("aten::"):
            self.builtins.check(node, here)
            if node.op.startswith("higher_order::"):
                check_bodies(node, graph.subgraphs, values, here, typed=not self.is_cast)
        _check_new(node.name, values, here)
        if id(node.meta) not in metas:
            self.described |= introduced(node.meta)
            check_meta(node.meta, self.described, here)
            metas.add(id(node.meta))
        if isinstance(node.meta, SequenceMeta):
            results, most = len(node.meta.items), self.limits.results
            here.require(
                results <= most, f"{results} results of a node; at most {most} are read", "bundle-limit/results"
            )
        if self.has_signatures or node.op in graph.schemas:
            # Dtypes behind a fault follow from what may be false.
            follows = not self.is_cast and here.found == self.faults
            call = (follows, *typed_call(node, values))
            if call not in calls:
                check_types(node, graph.schemas.get(node.op), values, here, infers_dtypes=follows)
                calls.add(call)


def _check_new(name: str, values: Mapping[str, ValueMeta], where: Place) -> None:
    if name in values:
        raise where.invalid(f"value {name[:80]!r} is defined twice", "name-twice/value")


def check_allowed(op: str, namespaces: set[str], *, where: Place) -> None:
    """Refuse an operator that no bundle may call, or whose namespace the manifest does not declare."""
    namespace, _, name = op.partition("::")
    if namespace == "aten":
        message = f"operator `{op[:80]}` is not on the list of operators that a bundle may call"
        where.require(name in allowed_aten_operators(), message, "operator-unlisted/aten")
    elif namespace in NAMESPACES:
        where.require(op in OPERANDS, f"unknown builtin `{op[:80]}`", "operator-unlisted/builtin")
    elif namespace not in namespaces:
        message = f"operator `{op[:80]}` is in namespace `{namespace[:40]}`, which the manifest does not declare"
        raise where.invalid(message, "operator-undeclared/namespace")


def _check_calls(graph: Graph, symbols: set[str], place: Place) -> None:
    """Refuse calls of submodules that are no nested runs of a graph's nodes, or use other values than the graph's."""
    message = f"{len(graph.calls)} calls of submodules; at most {MAX_NODES} are read"
    place.require(len(graph.calls) <= MAX_NODES, message, "bundle-limit/calls")
    places = {value.name: -1 for value in graph.inputs}
    places |= {node.name: index for index, node in enumerate(graph.nodes)}
    ends: dict[int | None, int] = {}
    for index, call in enumerate(graph.calls):
        subject, where = f"call {index} of a submodule", place.at(index)
        low, high = 0, len(graph.nodes)
        if call.parent is not None:
            check_index(call.parent, index, f"parent of {subject}", "index-range/call-parent", where)
            low, high = graph.calls[call.parent].begin, graph.calls[call.parent].end
        is_run = max(low, ends.get(call.parent, 0)) <= call.begin <= call.end <= high
        message = f"{subject} is no run of nodes after the one before it, in the one around it"
        where.require(is_run, message, "module-malformed/run")
        ends[call.parent] = call.end
        check_argument(call.values, places, graph.subgraphs, symbols, where)
        if call.arguments is None or call.result is None:
            message = f"{subject} has no structure, and no reason why"
            where.require(call.refusal is not None, message, "module-malformed/call-structure")
            continue
        pair = call.arguments.items if isinstance(call.arguments, trees.Sequence) else ()
        is_pair = len(pair) == 2 and isinstance(pair[0], trees.Sequence) and isinstance(pair[1], trees.Mapping)
        message = f"arguments of {subject} are no pair of positional and keyword arguments"
        where.require(is_pair, message, "module-malformed/call-arguments")
        for tree, end in ((call.arguments, call.begin), (call.result, call.end)):
            used = [call.values[leaf.index] for _, leaf in leaves(tree) if isinstance(leaf, trees.Leaf)]
            is_early = all(places[name] < end for value in used for name in references(value))
            message = f"{subject} takes or returns a value that is computed after it"
            where.require(is_early, message, "module-malformed/late-value")


_SIZED = frozenset(
    (
        *("arange", "empty", "empty_permuted", "empty_strided", "eye", "full", "linspace", "logspace", "new_empty"),
        *("new_empty_strided", "new_full", "new_ones", "new_zeros", "ones", "rand", "randint", "randn", "randperm"),
        *("repeat", "resize_", "tril_indices", "triu_indices", "zeros"),
    )
)
"""Operators that make a tensor of sizes that are arguments."""


def _check_allocations(graph: Graph, limits: Limits, where: Place) -> None:
    """Refuse a graph whose values take more memory at once than the limit, or one of whose operators does.

    Sizes of symbols are not known yet, and count as nothing; views take no memory of their own.
    """
    used = [_used(node) for node in graph.nodes]
    last = {name: index for index, names in enumerate(used) for name in names}
    last.update(dict.fromkeys(references(graph.outputs), len(used)))
    held: dict[str, int] = {}
    sizes: dict[int, int] = {}
    live = 0
    for index, node in enumerate(graph.nodes):
        base = _base(node.op)
        if base not in VIEWS:
            if id(node.meta) not in sizes:  # Layers repeat their metadata.
                sizes[id(node.meta)] = _declared_nbytes(node.meta)
            held[node.name] = nbytes = sizes[id(node.meta)]
            live += nbytes
        asked = max(live, _asked_nbytes(node)) if base in _SIZED else live
        if asked > limits.allocation_nbytes:
            most = limits.allocation_nbytes
            message = f"`{node.op}` takes the graph's memory to {asked} bytes; at most {most} are given"
            raise where.at("nodes", index).invalid(message, "bundle-limit/memory")
        for name in used[index]:
            if last[name] == index:
                live -= held.pop(name, 0)


def _used(node: Node) -> list[str]:
    """Return the names of the values that a node uses, and its own: a value that nothing uses is freed at once."""
    names = [node.name]
    for argument in (*node.args, *node.kwargs.values()):
        names += (argument,) if isinstance(argument, str) else references(argument)
    return names


def _declared_nbytes(meta: ValueMeta) -> int:
    """Return the memory of a value whose sizes are numbers; 0: they are not, or it is no tensor."""
    if isinstance(meta, SequenceMeta):
        return sum(map(_declared_nbytes, meta.items))
    if not isinstance(meta, TensorMeta):
        return 0
    last = 0
    for size, step in zip(meta.shape, meta.stride, strict=True):
        if not isinstance(size, int) or not isinstance(step, int) or size <= 0:
            return 0
        last += (size - 1) * abs(step)
    return (last + 1) * _itemsize(meta.dtype)


def _asked_nbytes(node: Node) -> int:
    """Return the memory of a tensor that an operator of `_SIZED` makes of literal sizes; 0: they are not literal."""
    base = _base(node.op)
    counts = node.args[2:3] if base in ("linspace", "logspace") else node.args[:2]
    sizes = next((argument for argument in node.args if isinstance(argument, list)), counts)
    numbers = [abs(size) for size in sizes if isinstance(size, int) and not isinstance(size, bool)]
    if base == "eye" and len(numbers) == 1:
        numbers *= 2
    count = max(numbers, default=0) if base == "arange" else math.prod(numbers)
    dtype = node.kwargs.get("dtype")
    return count * (_itemsize(dtype.value) if isinstance(dtype, DTypeArgument) else 4)


@cache
def _base(op: str) -> str:
    return op.removeprefix("aten::").partition(".")[0]


@cache
def _itemsize(dtype: str) -> int:
    digits = re.search(r"\d+", dtype)
    return 1 if digits is None else max(int(digits[0]) // 8, 1)
