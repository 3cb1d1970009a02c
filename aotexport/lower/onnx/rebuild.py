"""A program's forward graph as a module of torch again, so that torch's exporters can take it.

Needs the bundle alone, not the model's code. The module is functional: what the program writes to is copied first, and
returned after its outputs.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx.traceback
from torch import fx, nn

from aotexport.errors import ExportFailed
from aotexport.lower.onnx.builtins import BUILTINS, COMPARISONS, SIZE_OPERATORS
from aotexport.lower.onnx.forms import FORMS, Ranks
from aotexport_runtime import dtypes, ops
from aotexport_runtime.engines.codegen import Environment, constant_value
from aotexport_runtime.engines.higher_order import EFFECTS
from aotexport_runtime.schema.graph import Graph, Node
from aotexport_runtime.schema.program import Program, SizeInput, StateInput
from aotexport_runtime.schema.sizes import Size
from aotexport_runtime.schema.values import (
    Argument,
    SizeArgument,
    SizeMeta,
    SliceArgument,
    StringArgument,
    SubgraphArgument,
    TensorMeta,
    ValueMeta,
)
from aotexport_runtime.validate.bounds import MAX_TEXT

_HIDDEN_WRITES = ("aten::batch_norm", "aten::instance_norm", "aten::native_batch_norm", "aten::cudnn_batch_norm")
_CHECKS = ("aten::_assert_scalar.default", "aten::_assert_async.default", "aten::_assert_async.msg")
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
    metas: dict[str, TensorMeta] = {}
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
        if not isinstance(spec, SizeInput):
            metas[name] = spec.meta
    for name in updated:
        body.replace(name)
    body.bind_symbols(program)
    outputs = body.run([*graph.outputs])
    results = [body.fresh(value, meta) for value, meta in zip(outputs, program.outputs, strict=True)]
    results += [body.fresh(body.inputs[name], metas[name]) for name in updated]
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
        self._metas = {value.name: value.meta for value in (*record.inputs, *record.nodes)}
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

    def _check(self, node: Node) -> None:
        """Keep what must hold, with its words."""
        message = next((arg.value for arg in node.args[1:] if isinstance(arg, StringArgument)), "a check fails")
        holds = self.call(torch.ops.aten.ne.Scalar, self._truth(node.args[0]), 0)
        holds = self.call(torch.ops.aten.reshape.default, holds, [])
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
        if node.op in COMPARISONS:
            operands = [self._truth(operand) for operand in node.args]
            return self.call(getattr(torch.ops.aten, COMPARISONS[node.op]).Tensor, *operands)
        return self.call(torch.ops.aten.scalar_tensor.default, self.values[argument], dtype=torch.int64)

    def _node(self, node: Node) -> Any:
        if node.op.startswith("higher_order::"):
            created = self._with_bodies(node)
        elif node.op in EFFECTS:
            raise ExportFailed(
                f"a region of autocast{self.where(node)} has no translation: export with `dtype` instead"
            )
        else:
            args = [self._argument(argument) for argument in node.args]
            kwargs = {name: self._argument(argument) for name, argument in node.kwargs.items()}
            created = self._operator(node, args, kwargs)
        if isinstance(created, fx.Node):
            created.meta["stack_trace"] = self._trace(node)
        return created

    def _operator(self, node: Node, args: list[Any], kwargs: dict[str, Any]) -> fx.Node:
        if node.op.startswith("python::"):
            if node.op not in BUILTINS:
                raise ExportFailed(f"`{node.op}` of a size{self.where(node)} has no translation to ONNX")
            return self.call(BUILTINS[node.op], *args)
        function: Any = ops.resolve(node.op, None, self.namespaces)
        # Normalisations write to their running statistics without saying so.
        self.may_write |= function._schema.is_mutable or node.op.startswith(_HIDDEN_WRITES)
        if node.op in FORMS:
            return FORMS[node.op](self.call, args, kwargs, self._ranks(node))
        return self.call(function, *args, **kwargs)

    def _ranks(self, node: Node) -> Ranks:
        metas = [self._metas.get(argument) if isinstance(argument, str) else None for argument in node.args]
        return [len(meta.shape) if isinstance(meta, TensorMeta) else None for meta in metas]

    def _with_bodies(self, node: Node) -> Any:
        """Return the results of an operator with bodies; of a hook there are none, since no gradients are recorded."""
        name = node.op.partition("::")[2]
        if name == "register_hook":
            return ()
        if name == "autograd_function":
            return self._inlined(node.args[0], [*self._argument(node.args[2]), *self._argument(node.args[3])])
        if name == "invoke_subgraph":
            return self._inlined(node.args[0], self._argument(node.args[1]))
        if name == "cond":
            return self._cond(node)
        operands = [self._argument(argument) for argument in node.args]
        operands = [tuple(operand) if isinstance(operand, list) else operand for operand in operands]
        if name == "map_impl":
            return self.call(torch.ops.higher_order.scan, operands[0], (), *operands[1:])
        if name not in ("while_loop", "scan"):
            raise ExportFailed(f"operator `{node.op}`{self.where(node)} has no translation to ONNX")
        return self.call(getattr(torch.ops.higher_order, name), *operands)

    def _inlined(self, body: Argument, operands: Sequence[Any]) -> list[Any]:
        """Return the results of a body for `operands`, its nodes put here."""
        assert isinstance(body, SubgraphArgument)
        inner = self._inner(body)
        inner.root, inner.graph, inner.checks = self.root, self.graph, self.checks
        inner.values = {value.name: operand for value, operand in zip(inner.record.inputs, operands, strict=True)}
        results = inner.run([*inner.record.outputs])
        self.may_write |= inner.may_write
        return results

    def _cond(self, node: Node) -> fx.Node:
        """Return the results of the branch that is taken, then whether what it checks holds."""
        predicate, operands = self._argument(node.args[0]), tuple(self._argument(node.args[3]))
        branches = [self._opened(branch) for branch in node.args[1:3]]
        checks = [check for branch, _ in branches for check in branch.checks]
        bodies: list[fx.Node] = []
        for branch, results in branches:
            held = [value if value.graph is branch.graph else branch.true() for _, value in checks]
            bodies.append(self._closed(branch, [*results, *held]))
        results = self.call(torch.ops.higher_order.cond, predicate, *bodies, operands)
        for index, (words, _) in enumerate(checks, len(branches[0][1])):
            self.checks.append((words, self.call(operator.getitem, results, index)))
        return results

    def true(self) -> fx.Node:
        """Return a truth as a tensor."""
        return self.call(torch.ops.aten.full.default, [], True, dtype=torch.bool)

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
            return self._body(argument)
        if isinstance(argument, SliceArgument):
            return slice(*(self._argument(part) for part in (argument.start, argument.stop, argument.step)))
        return constant_value(argument, Environment(self.namespaces))

    def _size(self, size: Size | float) -> Any:
        if isinstance(size, int | float):
            return size
        if isinstance(size, str):
            if size not in self._symbols:
                raise ExportFailed(
                    "a branch or loop body reads a dynamic size of none of its operands, which has no translation to "
                    "ONNX. Pass it in as an operand"
                )
            return self._symbols[size]
        if size.op not in SIZE_OPERATORS:
            raise ExportFailed(f"a size is computed by `{size.op}`, which has no translation to ONNX")
        operands = [self._size(operand) for operand in size.args]
        function, value = SIZE_OPERATORS[size.op], operands[0]
        for operand in operands[1:]:
            value = self.call(function, value, operand)
        return value

    def _body(self, body: SubgraphArgument) -> fx.Node:
        """Return a body of a loop as a module.

        Raises:
            ExportFailed: it has something that torch's exporters cannot take.
        """
        inner, results = self._opened(body)
        if inner.checks:
            raise ExportFailed(
                f"a loop body checks a value, which has no translation to ONNX: {inner.checks[0][0]}. Check what comes "
                "out of the loop, after it"
            )
        return self._closed(inner, results)

    def _inner(self, body: SubgraphArgument) -> _Body:
        inner = _Body(self.record.subgraphs[body.name], nn.Module(), self.namespaces)
        inner._symbols = self._symbols
        return inner

    def _opened(self, body: Argument) -> tuple[_Body, list[Any]]:
        """Return a body, to be closed, and its results."""
        assert isinstance(body, SubgraphArgument)
        inner = self._inner(body)
        inner._symbols = {}
        for index, graph_input in enumerate(inner.record.inputs):
            value = inner.values[graph_input.name] = inner.graph.placeholder(f"operand_{index}")
            inner.bind_operand(value, graph_input.meta)
        return inner, inner.run([*inner.record.outputs])

    def bind_operand(self, value: fx.Node, meta: ValueMeta) -> None:
        """Let sizes that a body reads be those of its operands."""
        if isinstance(meta, SizeMeta) and isinstance(meta.value, str):
            self._symbols[meta.value] = value
        for axis, size in enumerate(meta.shape if isinstance(meta, TensorMeta) else ()):
            if isinstance(size, str) and size not in self._symbols:
                self._symbols[size] = self.call(torch.ops.aten.sym_size.int, value, axis)

    def _closed(self, inner: _Body, results: Sequence[Any]) -> fx.Node:
        """Return a body with these results as a module."""
        inner.graph.output(tuple(results))
        self.may_write |= inner.may_write
        attribute = f"body_{sum(1 for _ in self.root.children())}"
        self.root.add_module(attribute, fx.GraphModule(inner.root, inner.graph))
        return self.graph.get_attr(attribute)


def location(graph: Graph, node: Node) -> str:
    """Return the user's line that `node` comes from, `model.py:12`; empty where it is not known."""
    if node.source is None:
        return ""
    line = graph.sources[node.source]
    return f"{line.file}:{line.line}"
