"""Rules of a graph by itself: single static assignment over names that it may call."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, replace
from keyword import iskeyword

from aotexport_runtime.allowed.operators import NAMESPACES, OPERANDS, allowed_aten_operators
from aotexport_runtime.errors import Place
from aotexport_runtime.schema.graph import Graph, Node
from aotexport_runtime.schema.limits import DEFAULT, Limits
from aotexport_runtime.schema.values import SequenceMeta, ValueMeta
from aotexport_runtime.validate.allocations import check_allocations
from aotexport_runtime.validate.arguments import check_argument, check_meta, introduced
from aotexport_runtime.validate.builtins import Builtins, check_bodies
from aotexport_runtime.validate.declared import check_declared
from aotexport_runtime.validate.modules import check_calls
from aotexport_runtime.validate.subclasses import check_subclass
from aotexport_runtime.validate.types import check_types, typed_call


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

    Args:
        graph: as decoded.
        symbols: symbols of its program. Values may introduce others, for sizes that depend on data: they describe
            values, and nothing is computed from them.
        namespaces: namespaces of custom operators that the manifest declares; the caller decides whether they may run.
        where: its file, for errors.
        limits: the most that it may ask for.
        has_signatures: whether it must have the signature of every operator that it calls.
        is_cast: whether its program runs under autocast.
    """
    faults, count = where.found, _count_nodes(graph)
    with where:
        if count > limits.nodes:
            raise where.invalid(f"{count} nodes; at most {limits.nodes} are read", "bundle-limit/nodes")
        check_declared(graph, where)
    if where.found == faults:
        _Check(graph, symbols, namespaces, where, limits, has_signatures, is_cast).run()


@dataclass
class _Check:
    """The check of one graph: the arguments of `check_graph`, and what the nodes so far have defined."""

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
        with where:
            check_calls(graph, self.symbols, where)
        for index, output in enumerate(graph.outputs):
            with where.at("outputs", index) as here:
                check_argument(output, self.values, graph.subgraphs, self.symbols, here)
        with where:
            if where.found == self.faults:
                check_allocations(graph, self.limits, where)
        for name, subgraph in graph.subgraphs.items():
            replace(self, graph=subgraph, where=where.at("subgraphs", name)).run()

    def _check_inputs(self) -> None:
        for index, record in enumerate(self.graph.subclasses):
            with self.where.at("subclasses", index) as here:
                check_subclass(record, self.symbols, here)
        for index, graph_input in enumerate(self.graph.inputs):
            with self.where.at("inputs", index) as here:
                self.described |= introduced(graph_input.meta)
                _define(graph_input.name, graph_input.meta, self.values, here)
                check_meta(graph_input.meta, self.described, here)

    def _check_nodes(self) -> None:
        graph, values, where = self.graph, self.values, self.where
        # Layers repeat their metadata and calls. Hashes of numbers are no secret: a graph could make all alike.
        metas, calls = set[int](), set[Hashable]()
        for index, node in enumerate(graph.nodes):
            here, before = where.at("nodes", index), where.found
            with here:
                _check_operator(node, self.namespaces, here)
                _check_arguments(node, graph, values, self.symbols, here)
                if not node.op.startswith("aten::"):
                    self.builtins.check(node, here)
                    if node.op.startswith("higher_order::"):
                        check_bodies(node, graph.subgraphs, values, here, typed=not self.is_cast)
            with here:
                _define(node.name, node.meta, values, here)
                if id(node.meta) not in metas:
                    self.described |= introduced(node.meta)
                    check_meta(node.meta, self.described, here)
                    metas.add(id(node.meta))
                results = len(node.meta.items) if isinstance(node.meta, SequenceMeta) else 0
                if results > self.limits.results:
                    message = f"{results} results of a node; at most {self.limits.results} are read"
                    raise here.invalid(message, "bundle-limit/results")
            with here:
                if where.found == before and (self.has_signatures or node.op in graph.schemas):
                    # Dtypes behind a fault follow from what may be false.
                    follows = not self.is_cast and where.found == self.faults
                    call = (follows, *typed_call(node, values))
                    if call not in calls:
                        check_types(node, graph.schemas.get(node.op), values, here, infers_dtypes=follows)
                        calls.add(call)


def _check_arguments(node: Node, graph: Graph, values: Mapping[str, ValueMeta], symbols: set[str], here: Place) -> None:
    for kind, arguments in (("args", enumerate(node.args)), ("kwargs", node.kwargs.items())):
        for step, argument in arguments:
            # Most are references to what is there.
            if not (isinstance(argument, str) and argument in values):
                check_argument(argument, values, graph.subgraphs, symbols, here.at(kind, step))


def _count_nodes(graph: Graph) -> int:
    return len(graph.nodes) + sum(map(_count_nodes, graph.subgraphs.values()))


def _define(name: str, meta: ValueMeta, values: dict[str, ValueMeta], where: Place) -> None:
    if name in values:
        raise where.invalid(f"value {name[:80]!r} is defined twice", "name-twice/value")
    values[name] = meta


def _check_operator(node: Node, namespaces: set[str], where: Place) -> None:
    check_allowed(node.op, namespaces, where=where)
    for keyword in node.kwargs:
        if not (keyword.isidentifier() and keyword.isascii()) or iskeyword(keyword):
            message = f"operator `{node.op[:80]}` has a malformed keyword {keyword[:40]!r}"
            raise where.invalid(message, "operator-malformed/keyword")


def check_allowed(op: str, namespaces: set[str], *, where: Place) -> None:
    """Refuse an operator that no bundle may call, or whose namespace the manifest does not declare."""
    namespace, _, name = op.partition("::")
    if namespace == "aten":
        if name not in allowed_aten_operators():
            message = f"operator `{op[:80]}` is not on the list of operators that a bundle may call"
            raise where.invalid(message, "operator-unlisted/aten")
    elif namespace in NAMESPACES:
        if op not in OPERANDS:
            raise where.invalid(f"unknown builtin `{op[:80]}`", "operator-unlisted/builtin")
    elif namespace not in namespaces:
        message = f"operator `{op[:80]}` is in namespace `{namespace[:40]}`, which the manifest does not declare"
        raise where.invalid(message, "operator-undeclared/namespace")
