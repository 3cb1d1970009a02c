"""A recorded graph as an FX graph under construction, node by node, with the subgraphs of its branches and loops."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx, nn

from aotexport.errors import ExportFailed
from aotexport.lower.onnx.forms import FORMS, Call, NoForm
from aotexport.lower.onnx.provenance import location, trace, where
from aotexport_runtime.execution import ops
from aotexport_runtime.execution.codegen import Environment, constant_value
from aotexport_runtime.execution.higher_order import EFFECTS
from aotexport_runtime.rewrite.names import ENTER_CHECKPOINT, EXIT_CHECKPOINT
from aotexport_runtime.schema.bounded import MAX_TEXT
from aotexport_runtime.schema.graph import Graph, Node
from aotexport_runtime.schema.program import Program, SizeInput
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

_HIDDEN_WRITES = ("aten::batch_norm", "aten::instance_norm", "aten::native_batch_norm", "aten::cudnn_batch_norm")
_CHECKS = ("aten::_assert_scalar.default", "aten::_assert_async.default", "aten::_assert_async.msg")
_WITHOUT_GRADIENTS = ("torch::set_grad_enabled", "torch::is_grad_enabled", ENTER_CHECKPOINT, EXIT_CHECKPOINT)
"""Operators without effect where no gradients are recorded."""
_MOVES = ("aten::set_data.default",)


class GraphBuilder:
    """An FX graph under construction from a recorded graph.

    Attributes:
        root: holds tensors and subgraphs that the graph refers to.
        values: value in the graph per name in the record.
        symbols: values of its sizes.
        checks: conditions in words, each with the node of its truth.
        may_write: whether some operator may write to its operands.
    """

    def __init__(self, record: Graph, root: nn.Module, namespaces: frozenset[str]) -> None:
        """Begin with an empty graph; `namespaces` are those of custom operators that the record may call."""
        self.record = record
        self.root = root
        self.namespaces = namespaces
        self.graph = fx.Graph()
        self.values: dict[str, Any] = {}
        self.may_write = False
        self.checks: list[tuple[str, fx.Node]] = []
        self._nodes = {node.name: node for node in record.nodes}
        self._metas = {value.name: value.meta for value in (*record.inputs, *record.nodes)}
        self.symbols = Symbols(self.call)

    def call(self, function: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """Add a call of a function; return its node."""
        return self.graph.call_function(function, args, kwargs)

    def run(self, outputs: Sequence[Argument]) -> list[Any]:
        """Add every node; return the values of `outputs`."""
        for node in self.record.nodes:
            if node.op in _CHECKS:
                self._check(node)
            elif node.op not in _WITHOUT_GRADIENTS:
                self.values[node.name] = self._node(node)
        return [self._argument(output) for output in outputs]

    def _check(self, node: Node) -> None:
        """Record a check's condition, with its message."""
        message = next((arg.value for arg in node.args[1:] if isinstance(arg, StringArgument)), "a check fails")
        holds = self.call(torch.ops.aten.ne.Scalar, self._truth(node.args[0]), 0)
        holds = self.call(torch.ops.aten.reshape.default, holds, [])
        holds.meta["stack_trace"] = trace(self.record, node)
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
        """Add a node, in its form; return its value. Every created node gets the provenance of `node`."""
        last = next(reversed(self.graph.nodes), None)
        value = self._value(node)
        for created in reversed(self.graph.nodes):
            if created is last:
                break
            created.meta.setdefault("stack_trace", trace(self.record, node))
        return value

    def _value(self, node: Node) -> Any:
        if node.op.startswith("higher_order::"):
            return self._higher_order(node)
        if node.op in EFFECTS:
            raise ExportFailed(
                f"a region of autocast{where(self.record, node)} has no translation: export with `dtype` instead"
            )
        args = [self._argument(argument) for argument in node.args]
        kwargs = {name: self._argument(argument) for name, argument in node.kwargs.items()}
        return self._operator(node, args, kwargs)

    def _operator(self, node: Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
        if node.op.startswith("python::"):
            if node.op not in BUILTINS:
                raise ExportFailed(f"`{node.op}` of a size{where(self.record, node)} has no translation to ONNX")
            return self.call(BUILTINS[node.op], *args)
        function: Any = ops.overload(node.op, None, self.namespaces)
        self._refuse_moves(node, function)
        # Normalisations write to their running statistics, which their schemas do not say.
        self.may_write |= function._schema.is_mutable or node.op.startswith(_HIDDEN_WRITES)
        if node.op not in FORMS:
            return self.call(function, *args, **kwargs)
        metas = [self._metas.get(argument) if isinstance(argument, str) else None for argument in node.args]
        metas = [meta if isinstance(meta, TensorMeta) else None for meta in metas]
        try:
            return FORMS[node.op](self.call, args, kwargs, metas)
        except NoForm as error:
            raise ExportFailed(
                f"operator `{node.op}`{where(self.record, node)} has no translation to ONNX: {error}"
            ) from None

    def _refuse_moves(self, node: Node, function: Any) -> None:
        """Refuse changes of a tensor's memory, or of an input's sizes or strides, which torch's exporters lose."""
        of_input = any(value.name == node.args[0] for value in self.record.inputs) if node.args else False
        moves = torch.Tag.inplace_view in function.tags and node.op != "aten::detach_.default"
        if node.op in _MOVES or (moves and of_input):
            raise ExportFailed(
                f"operator `{node.op}`{where(self.record, node)} changes memory, sizes or strides of a tensor, which "
                "has no form in ONNX. Let it write values alone, as `copy_` does, or make a new tensor"
            )

    def _higher_order(self, node: Node) -> Any:
        """Return the results of a higher-order operator; of a hook there are none, since no gradients are recorded."""
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
            raise ExportFailed(f"operator `{node.op}`{where(self.record, node)} has no translation to ONNX")
        return self.call(getattr(torch.ops.higher_order, name), *operands)

    def _inlined(self, subgraph: Argument, operands: Sequence[Any]) -> list[Any]:
        """Add the nodes of a subgraph here; return its results for `operands`."""
        assert isinstance(subgraph, SubgraphArgument)
        inner = self._inner(subgraph)
        inner.root, inner.graph, inner.checks, inner.symbols = self.root, self.graph, self.checks, self.symbols
        inner.values = {value.name: operand for value, operand in zip(inner.record.inputs, operands, strict=True)}
        results = inner.run([*inner.record.outputs])
        self.may_write |= inner.may_write
        return results

    def _cond(self, node: Node) -> fx.Node:
        """Return the results of the taken branch, then the truths of its checks."""
        predicate, operands = self._argument(node.args[0]), tuple(self._argument(node.args[3]))
        branches = [self._opened(branch) for branch in node.args[1:3]]
        checks = [check for branch, _ in branches for check in branch.checks]
        subgraphs: list[fx.Node] = []
        for branch, results in branches:
            truths = [value if value.graph is branch.graph else branch.true() for _, value in checks]
            subgraphs.append(self._closed(branch, [*results, *truths]))
        results = self.call(torch.ops.higher_order.cond, predicate, *subgraphs, operands)
        for index, (words, _) in enumerate(checks, len(branches[0][1])):
            self.checks.append((words, self.call(operator.getitem, results, index)))
        return results

    def true(self) -> fx.Node:
        """Return a truth as a tensor."""
        return self.call(torch.ops.aten.full.default, [], True, dtype=torch.bool)

    def _argument(self, argument: Argument) -> Any:
        if isinstance(argument, str):
            return self.values[argument]
        if isinstance(argument, list):
            return [self._argument(item) for item in argument]
        if isinstance(argument, SizeArgument):
            return self.symbols.value(argument.value)
        if isinstance(argument, SubgraphArgument):
            return self._subgraph(argument)
        if isinstance(argument, SliceArgument):
            return slice(*(self._argument(part) for part in (argument.start, argument.stop, argument.step)))
        return constant_value(argument, Environment(self.namespaces))

    def _subgraph(self, subgraph: SubgraphArgument) -> fx.Node:
        """Return the subgraph of a loop as a module."""
        inner, results = self._opened(subgraph)
        if inner.checks:
            raise ExportFailed(
                f"a loop body checks a value, which has no translation to ONNX: {inner.checks[0][0]}. Check what comes "
                "out of the loop, after it"
            )
        return self._closed(inner, results)

    def _inner(self, subgraph: SubgraphArgument) -> GraphBuilder:
        return GraphBuilder(self.record.subgraphs[subgraph.name], nn.Module(), self.namespaces)

    def _opened(self, subgraph: Argument) -> tuple[GraphBuilder, list[Any]]:
        """Return the builder of a subgraph and its results; `_closed` completes it."""
        assert isinstance(subgraph, SubgraphArgument)
        inner = self._inner(subgraph)
        for index, graph_input in enumerate(inner.record.inputs):
            value = inner.values[graph_input.name] = inner.graph.placeholder(f"operand_{index}")
            inner.symbols.bind_operand(value, graph_input.meta)
        return inner, inner.run([*inner.record.outputs])

    def _closed(self, inner: GraphBuilder, results: Sequence[Any]) -> fx.Node:
        """Complete a subgraph with these results; return its module."""
        inner.graph.output(tuple(results))
        self.may_write |= inner.may_write
        attribute = f"body_{sum(1 for _ in self.root.children())}"
        self.root.add_module(attribute, fx.GraphModule(inner.root, inner.graph))
        return self.graph.get_attr(attribute)


class Symbols:
    """Values of the symbols of a graph or subgraph."""

    def __init__(self, call: Call) -> None:
        """Begin without symbols; `call` adds a call to the graph."""
        self._call = call
        self._values: dict[str, Any] = {}

    def bind_dimensions(self, program: Program, inputs: Sequence[Any]) -> None:
        """Make the values of the program's symbols from its inputs, in order."""
        for dimension in program.dimensions:
            value = inputs[dimension.input_index]
            if not isinstance(program.inputs[dimension.input_index], SizeInput):
                value = self._call(torch.ops.aten.sym_size.int, value, dimension.axis)
            if dimension.offset:
                value = self._call(operator.sub, value, dimension.offset)
            if dimension.factor != 1:
                value = self._call(operator.floordiv, value, dimension.factor)
            self._values[dimension.symbol] = value

    def bind_operand(self, value: Any, meta: ValueMeta) -> None:
        """Take values of sizes that a subgraph reads from its operand."""
        if isinstance(meta, SizeMeta) and isinstance(meta.value, str):
            self._values[meta.value] = value
        for axis, size in enumerate(meta.shape if isinstance(meta, TensorMeta) else ()):
            if isinstance(size, str) and size not in self._values:
                self._values[size] = self._call(torch.ops.aten.sym_size.int, value, axis)

    def value(self, size: Size | float) -> Any:
        """Return the value of a size; refuse one that ONNX cannot compute."""
        if isinstance(size, int | float):
            return size
        if isinstance(size, str):
            if size not in self._values:
                raise ExportFailed(
                    "a branch or loop body reads a dynamic size of none of its operands, which has no translation to "
                    "ONNX. Pass it in as an operand"
                )
            return self._values[size]
        if size.op not in SIZE_OPERATORS:
            raise ExportFailed(f"a size is computed by `{size.op}`, which has no translation to ONNX")
        operands = [self.value(operand) for operand in size.args]
        function, value = SIZE_OPERATORS[size.op], operands[0]
        for operand in operands[1:]:
            value = self._call(function, value, operand)
        return value


_OPERATORS = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "eq", "ne", "lt", "le", "gt", "ge")

BUILTINS: dict[str, Callable[..., Any]] = {
    **{f"python::{name}": getattr(operator, name) for name in _OPERATORS},
    **{f"python::{name}": getattr(operator, name) for name in ("neg", "abs", "xor", "lshift", "rshift", "getitem")},
    "python::and": operator.and_,
    "python::or": operator.or_,
    "python::not": torch.sym_not,
    "python::sym_sum": torch.sym_sum,
    "python::sym_max": torch.sym_max,
    "python::sym_min": torch.sym_min,
    "python::sym_int": torch.sym_int,
    "python::sym_float": torch.sym_float,
    "python::sym_ite": torch.sym_ite,
    "python::floor": math.floor,
    "python::ceil": math.ceil,
    "python::round": round,
    "python::sqrt": torch.sym_sqrt,
}
"""Functions by name of the builtin in a graph; other builtins have no translation."""

SIZE_OPERATORS: dict[str, Callable[..., Any]] = {
    "add": operator.add,
    "mul": operator.mul,
    "floordiv": operator.floordiv,
    "mod": operator.mod,
    "pow": operator.pow,
    "min": torch.sym_min,
    "max": torch.sym_max,
    "ceildiv": lambda a, b: -(-a // b),
}
"""Functions by operator of a size expression."""

COMPARISONS = {f"python::{name}": name for name in ("eq", "ne", "lt", "le", "gt", "ge")}
"""Comparisons of `aten`, by name of the builtin."""
