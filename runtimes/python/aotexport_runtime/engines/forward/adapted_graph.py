"""Forward graphs with adapters: their calls beside the nodes that read adapted tensors."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec
import torch

from aotexport_runtime.execution.codegen import CALL_SUBMODULE, Environment
from aotexport_runtime.rewrite.names import names_in, operands, rename, renamed
from aotexport_runtime.schema.graph import Graph, ModuleCall, Node
from aotexport_runtime.schema.program import Program, StateInput
from aotexport_runtime.schema.values import Argument
from aotexport_runtime.submodules.adapter import Adapter
from aotexport_runtime.submodules.places import named

Kind = Literal["linear", "transposed", "embedding", "convolution"]
"""What an operator does with a weight; `transposed`: it multiplies by a matrix of inputs by outputs."""


@dataclass(frozen=True)
class Operands:
    """What an operator does with its weight; the indices of its input `x`, weight and bias; None: it takes none."""

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


@dataclass(frozen=True)
class Reader:
    """A use of a tensor in a graph by a node; without one the graph returns it.

    `operands`: places of its arguments; None: no adapter can change its result. `returned`: the graph returns that.
    """

    name: str
    node: Node | None
    operands: Operands | None
    returned: bool = False

    @property
    def op(self) -> str:
        """The operator; `return`: the graph returns the tensor."""
        return "return" if self.node is None else self.node.op


class Readers:
    """The uses of a module's tensors in the forward graph of a program."""

    def __init__(self, graph: Graph, program: Program) -> None:
        """Find the uses of every value in the forward graph of `program`."""
        self._graph = graph
        self._values = {
            spec.name: value.name
            for value, spec in zip(graph.inputs, program.inputs, strict=True)
            if isinstance(spec, StateInput)
        }
        self._nodes: dict[str, list[Node]] = {}
        for node in graph.nodes:
            for name in dict.fromkeys(operands(node)):
                self._nodes.setdefault(name, []).append(node)
        self._returned = set(names_in(graph.outputs))

    def value(self, names: Sequence[str]) -> str | None:
        """Return the graph input that is the tensor of these names; None: the program does not take it."""
        return next((self._values[name] for name in names if name in self._values), None)

    def of(self, names: Sequence[str], path: str) -> list[Reader]:
        """Return the uses of a tensor as that of the module at `path`.

        `names` are all its names; where it has several, only nodes of calls of the module are returned.
        """
        value = self.value(names)
        if value is None:
            return []
        nodes = self._nodes.get(value, [])
        if len(names) > 1:
            nodes = [node for node in nodes if node.module is not None and self._graph.modules[node.module] == path]
        found = [Reader(node.name, node, _operands(node, value), node.name in self._returned) for node in nodes]
        return [*found, Reader("", None, None)] if value in self._returned else found


def _operands(node: Node, value: str) -> Operands | None:
    """Return the places of a node's arguments; None: it uses the tensor otherwise than as a weight."""
    found = OPERATORS.get(node.op)
    scaled = node.op == "aten::addmm.default" and node.kwargs
    if found is None or scaled or len(node.args) <= found.weight or not isinstance(node.args[found.x], str):
        return None
    return found if node.args[found.weight] == value and operands(node).count(value) == 1 else None


def with_adapters(
    graph: Graph,
    program: Program,
    adapters: Sequence[tuple[str, Adapter]],
    names: Mapping[str, Sequence[str]],
    environment: Environment,
) -> tuple[Graph, Environment, tuple[str, ...]]:
    """Return a forward graph that calls adapters, its environment, and the adapted tensors' names.

    `adapters` are given with the paths of their modules, `names` are those of each state tensor, by its first.
    """
    readers = Readers(graph, program)
    all_names = {name: group for group in names.values() for name in group}
    before: list[tuple[str, str, Adapter]] = []
    after: dict[str, tuple[Operands, Adapter]] = {}
    adapted: list[str] = []
    for path, adapter in adapters:
        name = named(path, adapter.tensor)
        value, found = readers.value(all_names[name]), readers.of(all_names[name], path)
        if value is None or not found:
            continue
        adapted.append(name)
        if adapter.in_weight:
            before.append((value, f"{value} of {name}", adapter))
        else:
            after.update({each.name: (each.operands, adapter) for each in found if each.operands is not None})
    if not adapted:
        return graph, environment, ()
    functions: dict[str, Callable[..., torch.Tensor]] = {
        name: functools.partial(_adapted_tensor, adapter) for _, name, adapter in before
    }
    functions |= {name: functools.partial(_adapted_result, adapter) for name, (_, adapter) in after.items()}
    environment = dataclasses.replace(environment, submodules={**environment.submodules, **functions})
    return _rewritten(graph, before, after), environment, tuple(adapted)


def _adapted_result(adapter: Adapter, symbols: Any, *values: Any) -> torch.Tensor:
    return adapter.adapted(*values)


def _adapted_tensor(adapter: Adapter, symbols: Any, tensor: torch.Tensor) -> torch.Tensor:
    return adapter.adapted_tensor(tensor)


def _rewritten(
    graph: Graph, before: Sequence[tuple[str, str, Adapter]], after: Mapping[str, tuple[Operands, Adapter]]
) -> Graph:
    """Return the graph with calls of adapters before all nodes, and after nodes by name."""
    names = {value: name for value, name, _ in before}
    metas = {value.name: value.meta for value in graph.inputs}
    first = [Node(name=name, op=CALL_SUBMODULE, args=[value], meta=metas[value]) for value, name, _ in before]
    nodes, begins = list(first), [len(first)]
    for node in graph.nodes:
        node = renamed(node, names) if not names.keys().isdisjoint(operands(node)) else node
        nodes += [node] if node.name not in after else _adapted(node, after[node.name][0])
        begins.append(len(nodes))
    outputs = [rename(output, names) for output in graph.outputs]
    calls = tuple(_moved(call, begins, names) for call in graph.calls)
    return msgspec.structs.replace(graph, nodes=tuple(nodes), outputs=outputs, calls=calls)


def _adapted(node: Node, places: Operands) -> Iterator[Node]:
    own = f"{node.name} without adapter"
    yield msgspec.structs.replace(node, name=own)
    bias = None if places.bias is None or places.bias >= len(node.args) else node.args[places.bias]
    args: list[Argument] = [own, node.args[places.x], node.args[places.weight], bias]
    yield msgspec.structs.replace(node, op=CALL_SUBMODULE, args=args, kwargs={})


def _moved(call: ModuleCall, begins: Sequence[int], names: Mapping[str, str]) -> ModuleCall:
    values = [rename(value, names) for value in call.values]
    return msgspec.structs.replace(call, begin=begins[call.begin], end=begins[call.end], values=values)
