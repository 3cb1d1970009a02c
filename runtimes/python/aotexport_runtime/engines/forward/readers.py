"""Uses of weights in a forward graph, and the operators whose results an adapter can change."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Literal, NamedTuple

from aotexport_runtime.rewrite.names import computed_weights, names_in, operands
from aotexport_runtime.schema.graph import Graph, Node
from aotexport_runtime.schema.manifest import StateTensor
from aotexport_runtime.schema.program import Program, StateInput
from aotexport_runtime.schema.values import TensorMeta, ValueMeta

Kind = Literal["linear", "transposed", "embedding", "convolution"]
"""What an operator does with a weight; `transposed`: it multiplies by a matrix of inputs by outputs."""


class Operands(NamedTuple):
    """What an operator does with its weight; the places of its input `x`, weight and bias; None: it takes none."""

    kind: Kind
    x: int
    weight: int
    bias: int | None = None


OPERATORS = {
    "aten::linear.default": Operands("linear", 0, 1, 2),
    "aten::addmm.default": Operands("transposed", 1, 2, 0),
    "aten::mm.default": Operands("transposed", 0, 1),
    "aten::matmul.default": Operands("transposed", 0, 1),
    "aten::embedding.default": Operands("embedding", 1, 0),
    **{
        f"aten::conv{rank}d.{overload}": Operands("convolution", 0, 1, 2)
        for rank in (1, 2, 3)
        for overload in ("default", "padding")
    },
}
"""Operators whose results an adapter can change."""
_TRANSPOSITIONS = ("aten::t.default", "aten::numpy_T.default")
_AROUND = ("aten::view.default", "aten::reshape.default", "aten::sym_size.int", "aten::add.Tensor")
_OF_TRANSPOSED: dict[Kind, Kind] = {"linear": "transposed", "transposed": "linear"}
"""What an operator does with a weight, by what it does with the transposed one."""


class Reader(NamedTuple):
    """A use of a tensor in a graph by a node; None: the graph returns it.

    `operands`: places of its arguments; None: no adapter can change its result. `returned`: the graph returns
    that, or what it computes of it without further weights. `value`: the tensor; None: the node's layer computes it.
    """

    node: Node | None
    operands: Operands | None
    returned: bool = False
    value: str | None = None

    @property
    def op(self) -> str:
        """The operator; `return`: the graph returns the tensor."""
        return "return" if self.node is None else self.node.op


class Readers:
    """The uses of a module's tensors in the forward graph of a program."""

    def __init__(self, graph: Graph, program: Program) -> None:
        """Find the uses of every value in the forward graph of `program`."""
        self._graph = graph
        inputs = list(zip(graph.inputs, program.inputs, strict=True))
        self._values = {spec.name: value.name for value, spec in inputs if isinstance(spec, StateInput)}
        self._nodes: dict[str, list[Node]] = {}
        for node in graph.nodes:
            for name in dict.fromkeys(operands(node)):
                self._nodes.setdefault(name, []).append(node)
        metas: dict[str, ValueMeta] = {value.name: value.meta for value, spec in inputs if isinstance(spec, StateInput)}
        chains, by_name = computed_weights(graph.nodes, metas), {node.name: node for node in graph.nodes}
        self.computed: dict[str, StateTensor] = {}
        """Weights that layers compute of integers, by the name that a weight of theirs has."""
        self._over_integers: dict[str, list[Node]] = {}
        for node in map(by_name.__getitem__, chains):
            meta = by_name[str(node.args[1])].meta
            if node.module is None or not isinstance(meta, TensorMeta):
                continue
            weight, shape = f"{graph.modules[node.module]}.weight", tuple(s for s in meta.shape if isinstance(s, int))
            self.computed[weight] = StateTensor(name=weight, role="parameter", dtype=meta.dtype, shape=shape, stride=())
            self._over_integers.setdefault(weight, []).append(node)
        self._returned, state = set(names_in(graph.outputs)), {*metas, *itertools.chain(*chains.values())}
        state.update(node.name for node in graph.nodes if node.op in _TRANSPOSITIONS and node.args[0] in state)
        for node in reversed(graph.nodes):
            if node.name in self._returned and state.isdisjoint(operands(node)):
                self._returned.update(operands(node))

    def is_layer(self, name: str) -> bool:
        """Return whether the module of a weight only multiplies by it and adds its bias, unlike a router."""
        path, _, tensor = name.rpartition(".")
        own, made = [node for node in self._graph.nodes if self._path(node) == path], set[str]()
        state = {value for each, value in self._values.items() if each in (name, f"{path}.bias")}
        for node in own:
            read = set(operands(node))
            is_other = node.op not in {*OPERATORS, *_TRANSPOSITIONS, *_AROUND} or (node.op in OPERATORS and read & made)
            if is_other or (node.op == "aten::add.Tensor" and not read & state):
                return name in self.computed
            made.update([node.name] * bool(node.op in OPERATORS or read & made))
        is_alone = all(each in (name, f"{path}.bias") for each in self._values if each.rpartition(".")[0] == path)
        return name in self.computed or (tensor == "weight" and is_alone)

    def is_called(self, path: str) -> bool:
        """Return whether the model's code uses a module by calls alone."""
        calls = [call for call in self._graph.calls if self._graph.modules[call.module] == path]
        return all(call.refusal is None for call in calls)

    def _path(self, node: Node) -> str | None:
        return None if node.module is None else self._graph.modules[node.module]

    def value(self, names: Sequence[str]) -> str | None:
        """Return the graph input that is the tensor of these names; None: the program does not take it."""
        return next((self._values[name] for name in names if name in self._values), None)

    def of(self, names: Sequence[str], path: str) -> list[Reader]:
        """Return the uses of a tensor as that of the module at `path`.

        `names` are all its names; where it has several, only nodes of calls of the module are returned.
        """
        if names[0] in self.computed:
            over = self._over_integers[names[0]]
            return [Reader(node, OPERATORS[node.op], node.name in self._returned) for node in over]
        value = self.value(names)
        if value is None:
            return []
        nodes = self._nodes.get(value, [])
        if len(names) > 1:
            nodes = [node for node in nodes if self._path(node) == path]
        found = [reader for node in nodes for reader in self._read(node, value)]
        return [*found, Reader(None, None)] if value in self._returned else found

    def _read(self, node: Node, value: str) -> list[Reader]:
        """Return a node's use of a tensor, or those of the transposed tensor that it makes, if all are products."""
        itself, turned = [Reader(node, _operands(node, value), node.name in self._returned, value)], list[Reader]()
        if node.op not in _TRANSPOSITIONS or node.name in self._returned:
            return itself
        for each in self._nodes.get(node.name, []):
            places = _operands(each, node.name)
            if places is None or places.kind not in _OF_TRANSPOSED:
                return itself
            places = places._replace(kind=_OF_TRANSPOSED[places.kind])
            turned.append(Reader(each, places, each.name in self._returned, value))
        return turned or itself


def _operands(node: Node, value: str) -> Operands | None:
    """Return the places of a node's arguments; None: it uses the tensor otherwise than as a weight."""
    found = OPERATORS.get(node.op)
    scaled = node.op == "aten::addmm.default" and node.kwargs
    if found is None or scaled or len(node.args) <= found.weight or not isinstance(node.args[found.x], str):
        return None
    return found if node.args[found.weight] == value and operands(node).count(value) == 1 else None
