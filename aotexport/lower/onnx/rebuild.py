"""A program's forward graph as a functional module of torch, made of the bundle alone, for torch's exporters."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.fx.traceback import get_current_meta, preserve_node_meta, set_stack_trace

from aotexport.errors import ExportFailed
from aotexport.lower.onnx.draws import Draws, draws_of
from aotexport.lower.onnx.forms import FORMS, NoForm, as_strided
from aotexport_runtime.allowed.operators import sym_max, sym_min
from aotexport_runtime.execution import ops
from aotexport_runtime.execution.codegen import Environment, constant_value
from aotexport_runtime.execution.higher_order import EFFECTS
from aotexport_runtime.rewrite.names import ENTER_CHECKPOINT, EXIT_CHECKPOINT
from aotexport_runtime.schema.bounded import MAX_TEXT
from aotexport_runtime.schema.graph import Graph, Node
from aotexport_runtime.schema.program import Program, SizeInput, StateInput
from aotexport_runtime.schema.sizes import Size, SizeExpression
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
from aotexport_runtime.validate.arguments import graphs_of, metas_of, span_end
from aotexport_runtime.values import dtypes
from aotexport_runtime.values.sizes import evaluate, symbols_of

aten = torch.ops.aten
_HIDDEN_WRITES = ("aten::batch_norm", "aten::instance_norm", "aten::native_batch_norm", "aten::cudnn_batch_norm")
_CHECKS = ("aten::_assert_scalar.default", "aten::_assert_async.default", "aten::_assert_async.msg")
_WITHOUT_GRADIENTS = ("torch::set_grad_enabled", "torch::is_grad_enabled", ENTER_CHECKPOINT, EXIT_CHECKPOINT)
"""Operators without effect where no gradients are recorded."""

_COMPARISONS = {f"python::{name}": name for name in ("eq", "ne", "lt", "le", "gt", "ge")}
_OPERATORS = (
    *("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "neg", "abs", "xor", "lshift", "rshift", "getitem"),
    *_COMPARISONS.values(),
)
_SIZE_OPERATORS = {"add", "mul", "floordiv", "mod", "pow", "min", "max", "ceildiv"}
"""Those of size expressions that ONNX can compute."""

_BUILTINS: dict[str, Callable[..., Any]] = {
    **{f"python::{name}": getattr(operator, name) for name in _OPERATORS},
    **{f"python::{name}": getattr(torch, name) for name in ("sym_sum", "sym_int", "sym_float", "sym_ite")},
    "python::and": operator.and_,
    "python::or": operator.or_,
    "python::not": torch.sym_not,
    **{f"python::{each.__name__}": each for each in (sym_max, sym_min, math.floor, math.ceil, round)},
    "python::sqrt": torch.sym_sqrt,
}
"""Functions by name of the builtin in a graph; other builtins have no translation."""


class Rebuilt(nn.Module):
    """A program as a module, which takes a positional argument per input of the program that is no state.

    Attributes:
        state: names of state tensors, per attribute of the module that holds one.
        updates: names of inputs and state tensors whose values after the call follow the program's outputs.
        checks: conditions on values, in words; their truths follow the values of `updates`.
        may_write: whether some operator may write to its operands.
    """

    def __init__(
        self,
        program: Program,
        graph: Graph,
        tensors: Mapping[str, torch.Tensor],
        *,
        namespaces: Iterable[str] = (),
        updated: Sequence[str] = (),
    ) -> None:
        """Take the state of `program` by name, borrowed.

        The graph writes to `updated`, names of state tensors and paths of arguments, and may call custom operators of
        `namespaces`. A call raises `ExportFailed` if torch cannot take the graph.
        """
        super().__init__()
        self._program, self._graph, self._namespaces = program, graph, frozenset(namespaces)
        self.updates, self.checks = tuple(updated), tuple(_messages(graph))
        self.may_write = any(_writes(n, self._namespaces) for each in graphs_of(graph) for n in each.nodes)
        self.state: dict[str, str] = {}
        self._views: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {}
        for spec in program.inputs:
            if isinstance(spec, StateInput):
                attribute = f"state_{len(self.state)}"
                self.state[attribute] = spec.name
                if spec.name in self.updates and not tensors[spec.name].is_contiguous():
                    raise ExportFailed(
                        f"program `{program.name}` changes `{spec.name}`, whose memory is not in the order of its "
                        "axes, and ONNX knows no other order. Make it contiguous before the export"
                    )
                stored, self._views[attribute] = _contiguous(tensors[spec.name].detach())
                self.register_buffer(attribute, stored)

    def forward(self, *args: Any) -> tuple[torch.Tensor, ...]:
        """Return the program's outputs, the values of `updates`, and the truths of `checks`."""
        program, given = self._program, iter(args)
        held = (view(getattr(self, attribute)) for attribute, view in self._views.items())
        values: list[Any] = [next(held if isinstance(spec, StateInput) else given) for spec in program.inputs]
        taken = [*args, *self.buffers()]
        places = {s.name if isinstance(s, StateInput) else s.path: index for index, s in enumerate(program.inputs)}
        updated = [places[name] for name in self.updates]
        for index in updated:
            values[index] = aten.clone.default(values[index])
        run = _Run(self._graph, self._namespaces, values, _symbols(program, values), draws_of(program, values))
        with preserve_node_meta():
            results = [*zip(run.outputs(), program.outputs, strict=True)]
            results += [(values[index], self._graph.inputs[index].meta) for index in updated]
            return (*(_fresh(value, meta, taken) for value, meta in results), *run.truths)


def _contiguous(tensor: torch.Tensor) -> tuple[torch.Tensor, Callable[[torch.Tensor], torch.Tensor]]:
    """Return a contiguous tensor over the memory of `tensor`, and the function that makes `tensor` of it."""
    order = sorted(range(tensor.dim()), key=lambda axis: (-tensor.stride(axis), -tensor.shape[axis]))
    shape, stride, turned = tensor.shape, tensor.stride(), tensor.permute(order)
    if tensor.is_contiguous():
        return tensor, lambda stored: stored
    if turned.is_contiguous():
        inverse = [order.index(axis) for axis in range(tensor.dim())]
        return turned, lambda stored: aten.permute.default(stored, inverse)
    flat = tensor.as_strided((span_end(shape, stride, 0),), (1,))
    return flat, lambda stored: aten.as_strided.default(stored, shape, stride)


def _symbols(program: Program, inputs: Sequence[Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for dimension in program.dimensions:
        value = inputs[dimension.input_index]
        size = value if isinstance(program.inputs[dimension.input_index], SizeInput) else value.shape[dimension.axis]
        found[dimension.symbol] = (size - dimension.offset) // dimension.factor
    return found


def _fresh(value: Any, meta: ValueMeta | None, taken: list[Any]) -> torch.Tensor:
    """Return `value`, whose metadata is `meta`, as a tensor that is none of `taken`, and take it."""
    if not isinstance(meta, TensorMeta):
        return aten.scalar_tensor.default(value, dtype=torch.int64)
    if meta.dtype in ("float16", "bfloat16"):
        # Torch's exporter leaves sums of these in float32.
        return aten._to_copy.default(value, dtype=dtypes.dtype(meta.dtype))
    if any(value is other for other in taken):
        return aten.clone.default(value)
    taken.append(value)
    return value


def _writes(node: Node, namespaces: frozenset[str]) -> bool:
    """Return whether a node may write to its operands; schemas of normalisations do not say that they do."""
    if node.op.startswith(("python::", "torch::", "higher_order::", *_HIDDEN_WRITES)):
        return node.op.startswith(_HIDDEN_WRITES)
    function: Any = ops.overload(node.op, None, namespaces)
    return function._schema.is_mutable


def _messages(graph: Graph) -> Iterator[str]:
    """Yield the conditions of the checks in a graph, in words, in the order of their truths."""
    for node in graph.nodes:
        if node.op in _CHECKS:
            message = next((arg.value for arg in node.args[1:] if isinstance(arg, StringArgument)), "a check fails")
            yield " ".join(f"{location(graph, node)}: {message}".removeprefix(": ").split())[:MAX_TEXT]
        elif node.op.startswith("higher_order::") and node.op != "higher_order::register_hook":
            # Of a custom function, the forward alone is run; the bodies of its backward are in a list.
            bodies = [graph.subgraphs[each.name] for each in node.args if isinstance(each, SubgraphArgument)]
            words = [message for body in bodies for message in _messages(body)]
            if words and node.op.partition("::")[2] not in ("invoke_subgraph", "autograd_function"):
                raise ExportFailed(
                    f"a branch or loop body checks a value, which has no translation to ONNX: {words[0]}. Check what "
                    "comes out of it, after it"
                )
            yield from words


# --- a run ------------------------------------------------------------------------------------------------


@dataclass
class _Run:
    """A run of a recorded graph, operator by operator, so that a trace of it keeps the provenance of each."""

    record: Graph
    namespaces: frozenset[str]
    inputs: Sequence[Any]
    symbols: dict[str, Any]
    draws: Draws | None = None
    values: dict[str, Any] = field(default_factory=dict)
    truths: list[torch.Tensor] = field(default_factory=list)

    def outputs(self) -> list[Any]:
        """Run every node; return the graph's outputs."""
        around = [get_current_meta().get("stack_trace", "")]
        self.values |= zip((value.name for value in self.record.inputs), self.inputs, strict=True)
        for node in self.record.nodes:
            if node.op not in _WITHOUT_GRADIENTS:
                self.step(node)
        set_stack_trace([each for each in around if each])
        return [self._argument(output) for output in self.record.outputs]

    def step(self, node: Node) -> None:
        """Run a node; `at` tells `failing_step` which."""
        at = trace(self.record, node)
        set_stack_trace([at])
        if node.op in _CHECKS:
            holds = aten.ne.Scalar(self._truth(node.args[0]), 0)
            self.truths.append(aten.reshape.default(holds, []))
        elif node.op in EFFECTS:
            raise ExportFailed(
                f"a region of autocast{where(self.record, node)} has no translation: export with `dtype` instead"
            )
        elif node.op.startswith("higher_order::"):
            self.values[node.name] = self._higher_order(node)
        else:
            args = [self._argument(argument) for argument in node.args]
            kwargs = {name: self._argument(argument) for name, argument in node.kwargs.items()}
            self.values[node.name] = self._operator(node, args, kwargs)

    def _truth(self, argument: Argument) -> Any:
        """Return a number, or a comparison of numbers, as a tensor: models have no other outputs."""
        if not isinstance(argument, str):
            number = self._argument(argument)
            dtype = torch.float64 if isinstance(number, float) else torch.int64
            return aten.scalar_tensor.default(number, dtype=dtype)
        node = next((node for node in self.record.nodes if node.name == argument), None)
        if node is None or isinstance(node.meta, TensorMeta):
            return self.values[argument]
        if node.op == "aten::item.default":
            return self._argument(node.args[0])
        if node.op in _COMPARISONS:
            operands = [self._truth(operand) for operand in node.args]
            return getattr(torch.ops.aten, _COMPARISONS[node.op]).Tensor(*operands)
        return aten.scalar_tensor.default(self.values[argument], dtype=torch.int64)

    def _operator(self, node: Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
        if node.op.startswith("python::"):
            if node.op not in _BUILTINS:
                raise ExportFailed(f"`{node.op}` of a size{where(self.record, node)} has no translation to ONNX")
            return _BUILTINS[node.op](*args)
        function: Any = ops.overload(node.op, None, self.namespaces)
        of_input = any(value.name == node.args[0] for value in self.record.inputs) if node.args else False
        moves = torch.Tag.inplace_view in function.tags and node.op != "aten::detach_.default"
        if node.op == "aten::set_data.default" or (moves and of_input):
            # Torch's exporters lose changes of a tensor's memory, and of an input's sizes or strides.
            raise ExportFailed(
                f"operator `{node.op}`{where(self.record, node)} changes memory, sizes or strides of a tensor, which "
                "has no form in ONNX. Let it write values alone, as `copy_` does, or make a new tensor"
            )
        try:
            if node.op == "aten::as_strided.default":
                metas: Any = metas_of(self.record)
                return as_strided(metas[node.args[0]], *args, **kwargs)
            if self.draws is not None and node.op == "aten::native_dropout.default":
                return self.draws.dropout(*args, **kwargs)
            return (FORMS.get(node.op) or function)(*args, **kwargs)
        except NoForm as error:
            raise ExportFailed(
                f"operator `{node.op}`{where(self.record, node)} has no translation to ONNX: {error}"
            ) from None

    def _higher_order(self, node: Node) -> Any:
        """Return the results of a higher-order operator; of a hook there are none, since no gradients are recorded."""
        name = node.op.partition("::")[2]
        if name == "register_hook":
            return ()
        if name in ("autograd_function", "invoke_subgraph"):
            operands = node.args[2:4] if name == "autograd_function" else node.args[1:2]
            given = [value for argument in operands for value in self._argument(argument)]
            results, truths = self._called(node.args[0], given, self.symbols)
            self.truths += truths
            return results
        operands = [self._argument(argument) for argument in node.args]
        operands = [tuple(operand) if isinstance(operand, list) else operand for operand in operands]
        if name == "map_impl":
            return torch.ops.higher_order.scan(operands[0], (), *operands[1:])
        if name not in ("cond", "while_loop", "scan"):
            raise ExportFailed(f"operator `{node.op}`{where(self.record, node)} has no translation to ONNX")
        return getattr(torch.ops.higher_order, name)(*operands)

    def _called(
        self, subgraph: Argument, operands: Sequence[Any], symbols: dict[str, Any] | None = None
    ) -> tuple[list[Any], list[torch.Tensor]]:
        """Return the results of a subgraph and the truths of its checks; `symbols`: None: those of its operands."""
        assert isinstance(subgraph, SubgraphArgument)
        record, known = self.record.subgraphs[subgraph.name], dict[str, Any]()
        for value, operand in zip(record.inputs, operands, strict=True):
            if isinstance(value.meta, SizeMeta) and isinstance(value.meta.value, str):
                known[value.meta.value] = operand
            for axis, size in enumerate(value.meta.shape if isinstance(value.meta, TensorMeta) else ()):
                if isinstance(size, str):
                    known.setdefault(size, operand.shape[axis])
        run = _Run(record, self.namespaces, operands, known if symbols is None else symbols)
        return run.outputs(), run.truths

    def _argument(self, argument: Argument) -> Any:
        if isinstance(argument, str):
            return self.values[argument]
        if isinstance(argument, list):
            return [self._argument(item) for item in argument]
        if isinstance(argument, SizeArgument):
            return self._size(argument.value)
        if isinstance(argument, SubgraphArgument):
            return lambda *operands: tuple(self._called(argument, operands)[0])
        if isinstance(argument, SliceArgument):
            return slice(*(self._argument(part) for part in (argument.start, argument.stop, argument.step)))
        return constant_value(argument, Environment(self.namespaces))

    def _size(self, size: Size) -> Any:
        if not symbols_of(size) <= self.symbols.keys():
            raise ExportFailed(
                "a branch or loop body reads a dynamic size of none of its operands, which has no translation to ONNX. "
                "Pass it in as an operand"
            )
        for op in sorted(_operators_of(size) - _SIZE_OPERATORS):
            raise ExportFailed(f"a size is computed by `{op}`, which has no translation to ONNX")
        return evaluate(size, self.symbols)


def _operators_of(size: Size | float) -> set[str]:
    return {size.op}.union(*map(_operators_of, size.args)) if isinstance(size, SizeExpression) else set()


# --- provenance: operator, module and line of the user, as a traceback that torch's exporters keep -----------


def location(graph: Graph, node: Node) -> str:
    """Return the user's line of `node`, `model.py:12`; empty: unknown."""
    return "" if node.source is None else "{0.file}:{0.line}".format(graph.sources[node.source])


def where(graph: Graph, node: Node) -> str:
    """Return ` (model.py:12)`, or nothing."""
    found = location(graph, node)
    return f" ({found})" if found else ""


def trace(graph: Graph, node: Node) -> str:
    """Return the user's line in the form of a traceback."""
    module = f", in {graph.modules[node.module]}" if node.module is not None else ""
    line = None if node.source is None else graph.sources[node.source]
    shown = "" if line is None else f'  File "{line.file}", line {line.line}, in {line.function}\n  '
    return f"{shown}  {node.op}{module}"


def origin(text: str | None) -> tuple[str, str]:
    """Return operator and ` (model.py:12)` of what `trace` wrote; each empty if it is unknown."""
    found = provenance(text)
    return found.get("operator", ""), f" ({found['source']})" if "source" in found else ""


def provenance(text: str | None) -> dict[str, str]:
    """Return the facts that `trace` wrote: user's `source` line, `operator`, `module`, as far as they are known."""
    lines = [line for line in (text or "").splitlines() if line.strip()]
    if not lines or "::" not in lines[-1]:
        return {}
    called, _, module = lines[-1].strip().partition(", in ")
    found = {"operator": called, **({"module": module} if module else {})}
    if len(lines) > 1 and lines[-2].strip().startswith('File "'):
        file, line, _ = lines[-2].strip().removeprefix('File "').split(", ", 2)
        found["source"] = f"{file[:-1]}:{line.removeprefix('line ')}"
    return found


def failing_step(frames: Iterable[Any]) -> str:
    """Return what `trace` wrote of the innermost node that frames of an error worked on; empty: of none."""
    return next((f.f_locals["at"] for f in reversed([*frames]) if f.f_code is _Run.step.__code__), "")
