"""A program's forward graph as a module of torch again, made of the bundle alone, for torch's exporters.

The module is functional: tensors that the program writes to are copied first, and returned after its outputs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx.traceback
from torch import fx, nn

from aotexport.lower.onnx.graph_builder import GraphBuilder
from aotexport_runtime.schema.graph import Graph
from aotexport_runtime.schema.program import Program, SizeInput, StateInput
from aotexport_runtime.schema.values import TensorMeta
from aotexport_runtime.values import dtypes


@dataclass(frozen=True)
class Rebuilt:
    """A program as a module.

    Attributes:
        module: takes one positional argument per input of the program that is no state.
        state: names of state tensors, per attribute of the module that holds one.
        updates: names of inputs and state tensors whose values after the call follow the program's outputs.
        checks: conditions on values, in words; their truths follow the values of `updates`.
        may_write: whether some operator may write to its operands.
    """

    module: nn.Module
    state: dict[str, str]
    updates: tuple[str, ...]
    checks: tuple[str, ...]
    may_write: bool


def rebuild(
    program: Program,
    graph: Graph,
    tensors: Mapping[str, torch.Tensor],
    *,
    namespaces: Iterable[str] = (),
    updated: Sequence[str] = (),
) -> Rebuilt:
    """Return the forward graph of `program` as a module.

    `tensors` is its state by name, borrowed. The graph writes to `updated`, names of state tensors and paths of
    arguments, and may call custom operators of `namespaces`.

    Raises:
        ExportFailed: torch's exporters cannot take the graph.
    """
    root = nn.Module()
    state: dict[str, str] = {}
    metas: dict[str, TensorMeta] = {}
    builder = _ProgramBuilder(graph, root, frozenset(namespaces))
    for spec, graph_input in zip(program.inputs, graph.inputs, strict=True):
        name = spec.name if isinstance(spec, StateInput) else spec.path
        if isinstance(spec, StateInput):
            attribute = f"state_{len(state)}"
            state[attribute] = spec.name
            node = builder.state(attribute, tensors[spec.name].detach())
        else:
            node = builder.graph.placeholder(f"argument_{len(builder.values) - len(state)}")
        builder.values[graph_input.name] = node
        builder.inputs[name] = node
        if not isinstance(spec, SizeInput):
            metas[name] = spec.meta
    for name in updated:
        builder.replace(name)
    builder.symbols.bind_dimensions(program, [builder.values[value.name] for value in graph.inputs])
    outputs = builder.run([*graph.outputs])
    results = [builder.fresh(value, meta) for value, meta in zip(outputs, program.outputs, strict=True)]
    results += [builder.fresh(builder.inputs[name], metas[name]) for name in updated]
    messages, holds = [message for message, _ in builder.checks], [value for _, value in builder.checks]
    builder.graph.output((*results, *holds))
    module = _Traced(fx.GraphModule(root, builder.graph))
    return Rebuilt(module, state, tuple(updated), tuple(messages), builder.may_write)


class _Traced(nn.Module):
    """Runs a graph node by node, so that a trace of it keeps each node's provenance."""

    def __init__(self, graph: fx.GraphModule) -> None:
        super().__init__()
        self.program = graph

    def forward(self, *args: Any) -> Any:
        with torch.fx.traceback.preserve_node_meta():
            return fx.Interpreter(self.program).run(*args)


class _ProgramBuilder(GraphBuilder):
    """The graph of a program, with the current values of inputs and state tensors, by path or name."""

    def __init__(self, record: Graph, root: nn.Module, namespaces: frozenset[str]) -> None:
        super().__init__(record, root, namespaces)
        self.inputs: dict[str, Any] = {}
        self._returned: set[Any] = set()

    def state(self, name: str, tensor: torch.Tensor) -> fx.Node:
        """Return a state tensor, as a view of a contiguous buffer over its memory."""
        if tensor.is_contiguous():
            self.root.register_buffer(name, tensor)
            return self.graph.get_attr(name)
        span = 1 + sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
        order = sorted(range(tensor.dim()), key=lambda axis: (-tensor.stride(axis), -tensor.shape[axis]))
        turned = tensor.permute(order)
        if turned.is_contiguous():
            self.root.register_buffer(name, turned)
            inverse = [order.index(axis) for axis in range(tensor.dim())]
            return self.call(torch.ops.aten.permute.default, self.graph.get_attr(name), inverse)
        self.root.register_buffer(name, tensor.as_strided((span,), (1,)))
        return self.call(torch.ops.aten.as_strided.default, self.graph.get_attr(name), tensor.shape, tensor.stride())

    def replace(self, name: str) -> None:
        """Replace the input or state tensor `name` by a copy that the graph may write to."""
        before = self.inputs[name]
        copy = self.inputs[name] = self.call(torch.ops.aten.clone.default, before)
        self.values = {key: copy if value is before else value for key, value in self.values.items()}

    def fresh(self, value: Any, meta: TensorMeta | None) -> Any:
        """Return `value`, whose metadata is `meta` (None: a size), as a tensor that is no input and no other output."""
        if not isinstance(value, fx.Node) or meta is None:
            return self.call(torch.ops.aten.scalar_tensor.default, value, dtype=torch.int64)
        if meta.dtype in ("float16", "bfloat16"):
            # Torch's exporter leaves sums of these in float32.
            return self.call(torch.ops.aten._to_copy.default, value, dtype=dtypes.dtype(meta.dtype))
        if value.op in ("placeholder", "get_attr") or value in self._returned:
            return self.call(torch.ops.aten.clone.default, value)
        self._returned.add(value)
        return value
