"""A program's forward graph as a module of torch again, so that torch's exporters can take it.

Needs the bundle alone, not the model's code. The module is functional: what the program writes to is copied first, and
returned after its outputs.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx.traceback
from torch import fx, nn

from aotexport.errors import ExportFailed
from aotexport_runtime import ops
from aotexport_runtime.engines.codegen import Environment, constant_value
from aotexport_runtime.engines.higher_order import EFFECTS
from aotexport_runtime.schema.graph import Graph, Node
from aotexport_runtime.schema.program import Program, SizeInput, StateInput
from aotexport_runtime.schema.sizes import Size
from aotexport_runtime.schema.values import (
    Argument,
    SizeArgument,
    SliceArgument,
    StringArgument,
    SubgraphArgument,
    TensorMeta,
)
from aotexport_runtime.validate.bounds import MAX_TEXT

BUILTINS: dict[str, Callable[..., Any]] = {
    **{f"python::{name}": getattr(operator, name) for name in ("add", "sub", "mul", "truediv", "floordiv", "mod")},
    **{f"python::{name}": getattr(operator, name) for name in ("pow", "eq", "ne", "lt", "le", "gt", "ge", "neg")},
    "python::and": operator.and_,
    "python::or": operator.or_,
    "python::getitem": operator.getitem,
    "python::not": torch.sym_not,
    "python::sym_sum": torch.sym_sum,
    "python::sym_max": torch.sym_max,
    "python::sym_min": torch.sym_min,
    "python::sym_int": torch.sym_int,
    "python::sym_float": torch.sym_float,
    "python::sym_ite": torch.sym_ite,
}
"""Builtins as functions that tracers of symbolic sizes know."""

_SIZE_OPERATORS: dict[str, Callable[..., Any]] = {
    "add": operator.add,
    "mul": operator.mul,
    "floordiv": operator.floordiv,
    "mod": operator.mod,
    "pow": operator.pow,
    "min": torch.sym_min,
    "max": torch.sym_max,
    "ceildiv": lambda a, b: -(-a // b),
}
_HIDDEN_WRITES = ("aten::batch_norm", "aten::instance_norm", "aten::native_batch_norm", "aten::cudnn_batch_norm")
_ATTENTION = "aten::scaled_dot_product_attention.default"
_FUNCTION = "higher_order::autograd_function"
_CHECKS = ("aten::_assert_scalar.default", "aten::_assert_async.default", "aten::_assert_async.msg")
_COMPARISONS = {f"python::{name}": name for name in ("eq", "ne", "lt", "le", "gt", "ge")}
_GRAD_MODE = ("torch::set_grad_enabled", "torch::is_grad_enabled")


@dataclass(frozen=True)
class Rebuilt:
    """A program as a module.

    Attributes:
        module: takes one positional argument per input of the program that is no state.
        state: names of state tensors, per attribute of the module that holds one.
        updates: names of inputs and state tensors whose values after the call follow the program's outputs.
        checks: what must hold of values, in words; whether it does follows the values of `updates`.
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

    Args:
        program: its record.
        graph: its forward graph.
        tensors: its state by name; borrowed.
        namespaces: of custom operators that the graph may call.
        updated: names of state tensors and paths of arguments that the graph writes to.

    Raises:
        ExportFailed: the graph has something that torch's exporters cannot take.
    """
    root = nn.Module()
    state: dict[str, str] = {}
    body = _Body(graph, root, frozenset(namespaces))
    for spec, graph_input in zip(program.inputs, graph.inputs, strict=True):
        name = spec.name if isinstance(spec, StateInput) else spec.path
        if isinstance(spec, StateInput):
            attribute = f"state_{len(state)}"
            state[attribute] = spec.name
            node = body.state(attribute, tensors[spec.name].detach())
        else:
            node = body.graph.placeholder(f"argument_{len(body.values) - len(state)}")
        body.values[graph_input.name] = node
        body.inputs[name] = node
    for name in updated:
        body.replace(name)
    body.bind_symbols(program)
    outputs = body.run([*graph.outputs])
    results = [body.fresh(value) for value in [*outputs, *(body.inputs[name] for name in updated)]]
    messages, holds = [message for message, _ in body.checks], [value for _, value in body.checks]
    body.graph.output((*results, *holds))
    module = _Traced(fx.GraphModule(root, body.graph))
    return Rebuilt(module, state, tuple(updated), tuple(messages), body.may_write)


class _Traced(nn.Module):
    """Runs a graph node by node, so that what is traced from it keeps each node's provenance."""

    def __init__(self, graph: fx.GraphModule) -> None:
        super().__init__()
        self.program = graph

    def forward(self, *args: Any) -> Any:
        with torch.fx.traceback.preserve_node_meta():
            return fx.Interpreter(self.program).run(*args)


class _Body:
    """An FX graph under construction from a recorded graph."""

    def __init__(self, record: Graph, root: nn.Module, namespaces: frozenset[str]) -> None:
        self.record = record
        self.root = root
        self.namespaces = namespaces
        self.graph = fx.Graph()
        self.values: dict[str, Any] = {}
        self.inputs: dict[str, Any] = {}
        self.may_write = False
        self.checks: list[tuple[str, fx.Node]] = []
        self._nodes = {node.name: node for node in record.nodes}
        self._symbols: dict[str, Any] = {}
        self._returned: set[Any] = set()

    def call(self, function: Any, *args: Any, **kwargs: Any) -> fx.Node:
        return self.graph.call_function(function, args, kwargs)

    def state(self, name: str, tensor: torch.Tensor) -> fx.Node:
        """Return a state tensor, made of a contiguous one that begins where it does in its memory."""
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
        """Let a copy stand for the input or state tensor `name`, for the graph to write to."""
        before = self.inputs[name]
        copy = self.inputs[name] = self.call(torch.ops.aten.clone.default, before)
        self.values = {key: copy if value is before else value for key, value in self.values.items()}

    def bind_symbols(self, program: Program) -> None:
        """Make the values of the program's symbols."""
        for dimension in program.dimensions:
            spec = program.inputs[dimension.input_index]
            value = self.values[self.record.inputs[dimension.input_index].name]
            if not isinstance(spec, SizeInput):
                value = self.call(torch.ops.aten.sym_size.int, value, dimension.axis)
            if dimension.offset:
                value = self.call(operator.sub, value, dimension.offset)
            if dimension.factor != 1:
                value = self.call(operator.floordiv, value, dimension.factor)
            self._symbols[dimension.symbol] = value

    def run(self, outputs: Sequence[Argument]) -> list[Any]:
        """Add every node; return the values of `outputs`."""
        for node in self.record.nodes:
            if node.op in _CHECKS:
                self._check(node)
            elif node.op not in _GRAD_MODE:
                self.values[node.name] = self._node(node)
        return [self._argument(output) for output in outputs]

    def fresh(self, value: Any) -> Any:
        """Return `value` as a tensor that is no input and no other output."""
        if not isinstance(value, fx.Node):
            return self.call(torch.ops.aten.scalar_tensor.default, value, dtype=torch.int64)
        if value.op in ("placeholder", "get_attr") or value in self._returned:
            return self.call(torch.ops.aten.clone.default, value)
        self._returned.add(value)
        return value

    def _check(self, node: Node) -> None:
        """Keep what must hold, with its words."""
        message = next((arg.value for arg in node.args[1:] if isinstance(arg, StringArgument)), "a check fails")
        holds = self.call(torch.ops.aten.ne.Scalar, self._truth(node.args[0]), 0)
        holds.meta["stack_trace"] = self._trace(node)
        words = " ".join(f"{location(self.record, node)}: {message}".removeprefix(": ").split())
        self.checks.append((words[:MAX_TEXT], holds))

    def _truth(self, argument: Argument) -> Any:
        """Return a number, or a comparison of numbers, as a tensor: models have no other outputs."""
        if not isinstance(argument, str):
            number = self._argument(argument)
            dtype = torch.float64 if isinstance(number, float) else torch.int64
            return self.call(torch.ops.aten.scalar_tensor.default, number, dtype=dtype)
        node = self._nodes.get(argument)
        if node is None or isinstance(node.meta, TensorMeta):
            return self.values[argument]
        if node.op == "aten::item.default":
            return self._argument(node.args[0])
        if node.op in _COMPARISONS:
            operands = [self._truth(operand) for operand in node.args]
            return self.call(getattr(torch.ops.aten, _COMPARISONS[node.op]).Tensor, *operands)
        return self.call(torch.ops.aten.scalar_tensor.default, self.values[argument], dtype=torch.int64)

    def _node(self, node: Node) -> Any:
        if node.op == _FUNCTION:
            return self._function(node)
        args = [self._argument(argument) for argument in node.args]
        kwargs = {name: self._argument(argument) for name, argument in node.kwargs.items()}
        if node.op.startswith("higher_order::"):
            bodies = [tuple(value) if isinstance(value, list) else value for value in args]
            created = self.call(getattr(torch.ops.higher_order, node.op.partition("::")[2]), *bodies)
        elif node.op in BUILTINS:
            created = self.call(BUILTINS[node.op], *args)
        elif node.op in EFFECTS:
            raise ExportFailed(
                f"a region of autocast{self.where(node)} has no translation: export with `dtype` instead"
            )
        else:
            function: Any = ops.resolve(node.op, None, self.namespaces)
            # Normalisations write to their running statistics without saying so.
            self.may_write |= function._schema.is_mutable or node.op.startswith(_HIDDEN_WRITES)
            if node.op == _ATTENTION and isinstance(node.meta, TensorMeta):
                created = self._attention(4 - len(node.meta.shape), function, args, kwargs)
            else:
                created = self.call(function, *args, **kwargs)
        created.meta["stack_trace"] = self._trace(node)
        return created

    def _function(self, node: Node) -> fx.Node:
        """Return the results of a custom autograd function: its forward, since no gradients are recorded."""
        forward, _, operands, additional, *_ = node.args
        assert isinstance(forward, SubgraphArgument)
        values = [*self._argument(operands), *self._argument(additional)]
        return self.graph.call_module(self._body(forward.name), tuple(values))

    def _attention(self, missing: int, function: Any, args: list[Any], kwargs: dict[str, Any]) -> fx.Node:
        """Return attention in four axes, the only form that torch's exporter translates."""
        for _ in range(missing):
            args[:3] = [self.call(torch.ops.aten.unsqueeze.default, value, 0) for value in args[:3]]
        created = self.call(function, *args, **kwargs)
        for _ in range(missing):
            created = self.call(torch.ops.aten.squeeze.dim, created, 0)
        return created

    def _trace(self, node: Node) -> str:
        """Return the user's line as a traceback says it, which is how torch's exporters keep it."""
        where = f", in {self.record.modules[node.module]}" if node.module is not None else ""
        if node.source is None:
            return f"  {node.op}{where}"
        line = self.record.sources[node.source]
        return f'  File "{line.file}", line {line.line}, in {line.function}\n    {node.op}{where}'

    def where(self, node: Node) -> str:
        """Return ` (model.py:12)`, or nothing."""
        return f" ({location(self.record, node)})" if node.source is not None else ""

    def _argument(self, argument: Argument) -> Any:
        if isinstance(argument, str):
            return self.values[argument]
        if isinstance(argument, list):
            return [self._argument(item) for item in argument]
        if isinstance(argument, SizeArgument):
            return self._size(argument.value)
        if isinstance(argument, SubgraphArgument):
            return self._subgraph(argument.name)
        if isinstance(argument, SliceArgument):
            return slice(*(self._argument(part) for part in (argument.start, argument.stop, argument.step)))
        return constant_value(argument, Environment(self.namespaces))

    def _size(self, size: Size | float) -> Any:
        if isinstance(size, int | float):
            return size
        if isinstance(size, str):
            if size not in self._symbols:
                raise ExportFailed("a branch or loop body reads a dynamic size, which has no translation")
            return self._symbols[size]
        if size.op not in _SIZE_OPERATORS:
            raise ExportFailed(f"a size is computed by `{size.op}`, which has no translation")
        operands = [self._size(operand) for operand in size.args]
        function, value = _SIZE_OPERATORS[size.op], operands[0]
        for operand in operands[1:]:
            value = self.call(function, value, operand)
        return value

    def _subgraph(self, name: str) -> fx.Node:
        return self.graph.get_attr(self._body(name))

    def _body(self, name: str) -> str:
        """Return the attribute that holds a body as a module.

        Raises:
            ExportFailed: it has something that torch's exporters cannot take.
        """
        attribute = f"body_{name}"
        if not hasattr(self.root, attribute):
            record = self.record.subgraphs[name]
            body = _Body(record, nn.Module(), self.namespaces)
            for index, graph_input in enumerate(record.inputs):
                body.values[graph_input.name] = body.graph.placeholder(f"operand_{index}")
            body.graph.output(tuple(body.run([*record.outputs])))
            if body.checks:
                raise ExportFailed(
                    f"a branch or loop body checks a value, which has no translation: {body.checks[0][0]}"
                )
            self.may_write |= body.may_write
            self.root.add_module(attribute, fx.GraphModule(body.root, body.graph))
        return attribute


def location(graph: Graph, node: Node) -> str:
    """Return the user's line that `node` comes from, `model.py:12`; empty where it is not known."""
    if node.source is None:
        return ""
    line = graph.sources[node.source]
    return f"{line.file}:{line.line}"
