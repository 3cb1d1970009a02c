"""Encode FX graphs as graph records, with provenance."""

from __future__ import annotations

import math
import operator
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import torch

from aotexport.capture.effects.applied_function import apply_function
from aotexport.capture.effects.checkpoints import enter_checkpoint, exit_checkpoint
from aotexport.capture.effects.distributed import FromLocal
from aotexport.capture.effects.hooks import apply_hook
from aotexport.capture.effects.module_calls import CLOCK, TracedCall
from aotexport.capture.functional.mutating_operators import call_subgraph
from aotexport.capture.passes.launches import launch_arguments, launched
from aotexport.capture.trace.forward_capture import ForwardCapture
from aotexport.encode.values import encode_argument, encode_meta
from aotexport.errors import ExportFailed
from aotexport.model.source_lines import source_of
from aotexport.torch_internals.launches import LAUNCHES
from aotexport.torch_internals.names import (
    ENTER_AUTOCAST,
    EXIT_AUTOCAST,
    SET_GRAD_ENABLED,
    HigherOrderOperator,
    OpOverload,
)
from aotexport.torch_internals.subclasses import is_wrap
from aotexport.values.subclasses import encode_subclass
from aotexport_runtime.allowed.operators import FLOAT_FUNCTIONS, OPERANDS, allowed_aten_operators
from aotexport_runtime.errors import first_line
from aotexport_runtime.schema.graph import Graph, GraphInput, ModuleCall, Node, SourceLine, Subclass
from aotexport_runtime.schema.values import Argument, DeviceArgument, SubgraphArgument
from aotexport_runtime.values import meshes
from aotexport_runtime.values.subclasses import inner_tensor

_NAMED_SO: tuple[Any, ...] = (
    *(operator.getitem, operator.add, operator.sub, operator.mul, operator.truediv, operator.floordiv, operator.mod),
    *(operator.pow, operator.neg, operator.abs, operator.eq, operator.ne, operator.lt, operator.le, operator.gt),
    *(operator.ge, operator.and_, operator.or_, operator.xor, operator.lshift, operator.rshift),
    *(torch.sym_max, torch.sym_min, torch.sym_int, torch.sym_float, torch.sym_ite, torch.sym_sum),
    *(math.floor, math.ceil, round),
)
"""Functions of numbers that have the same name in the format."""
_BUILTINS: dict[Any, str] = {
    **{function: f"python::{function.__name__.strip('_')}" for function in _NAMED_SO},
    math.trunc: "python::sym_int",
    torch.sym_not: "python::not",
    torch.sym_sqrt: "python::sqrt",
    **{getattr(torch, f"_sym_{name}"): f"python::{name}" for name in FLOAT_FUNCTIONS},
}
_FUNCTIONS: dict[Any, str] = {
    torch.is_grad_enabled: "torch::is_grad_enabled",
    SET_GRAD_ENABLED: "torch::set_grad_enabled",
    ENTER_AUTOCAST: "torch::enter_autocast",
    EXIT_AUTOCAST: "torch::exit_autocast",
    enter_checkpoint: "torch::enter_checkpoint",
    exit_checkpoint: "torch::exit_checkpoint",
    apply_function: "higher_order::autograd_function",
    apply_hook: "higher_order::register_hook",
    call_subgraph: "higher_order::invoke_subgraph",
    launched: "higher_order::triton_kernel",
    inner_tensor: "subclass::inner",
    meshes.to_local: "distributed::to_local",
    meshes.redistribute: "distributed::redistribute",
}
"""Functions of a graph that are operators of the format with the same arguments."""


@dataclass
class GraphEncoder:
    """One graph being encoded.

    Attributes:
        input_names: name per placeholder, in order.
        strip: leave out source lines and module paths.
        origins: nodes of another graph by name, which give their provenance to nodes made from them.
        constants: returns the name of the input that a closed-over tensor is.
    """

    module: torch.fx.GraphModule
    input_names: Sequence[str]
    root: Path | None = None
    strip: bool = False
    origins: dict[str, torch.fx.Node] = field(default_factory=dict)
    constants: Callable[[torch.Tensor], str | None] = lambda tensor: None

    def __post_init__(self) -> None:
        self.names: dict[torch.fx.Node, str | SubgraphArgument] = {}
        self._subgraphs: dict[str, Graph] = {}
        self._taken: set[str] = set(self.input_names)
        self._sources: dict[SourceLine, int] = {}
        self._modules: dict[str, int] = {}
        self._schemas: dict[str, str] = {}
        self._subclasses: list[Subclass] = []
        self._source_cache: dict[str, SourceLine | None] = {}

    def encode(self) -> Graph:
        """Return the record; `ExportFailed`: an operator that the format does not have, with the user's line."""
        graph = self.module.graph
        inputs: list[GraphInput] = []
        nodes: list[Node] = []
        outputs: Any = []
        names = iter(self.input_names)
        for node in graph.nodes:
            if node.op == "placeholder":
                name = self.names[node] = next(names)
                inputs.append(GraphInput(name=name, meta=encode_meta(node.meta.get("val"))))
            elif node.op == "get_attr":
                self._attribute(node)
            elif node.op == "call_function":
                nodes.append(self._node(node))
            elif node.op == "output":
                returned = node.args[0] if isinstance(node.args[0], tuple | list) else [node.args[0]]
                outputs = [encode_argument(value, self.names, "the output") for value in returned]
            else:
                raise ExportFailed(f"{self._where(node)}: a `{node.op}` node is not supported")
        return Graph(
            inputs=tuple(inputs),
            nodes=tuple(nodes),
            outputs=outputs,
            schemas=self._schemas,
            subgraphs=self._subgraphs,
            sources=tuple(self._sources),
            modules=tuple(self._modules),
            subclasses=tuple(self._subclasses),
        )

    def _attribute(self, node: torch.fx.Node) -> None:
        value = getattr(self.module, str(node.target), None)
        if isinstance(value, torch.fx.GraphModule):
            self.names[node] = self._subgraph(str(node.target), value)
            return
        name = self.constants(value) if isinstance(value, torch.Tensor) else None
        if name is None:
            if isinstance(getattr(value, "real_obj", value), torch.Generator):
                raise ExportFailed(
                    f"{self._where(node)}: draws from a `torch.Generator` of the model's own, and a bundle draws from "
                    "torch's default one alone. Leave `generator` out, or draw outside of the model"
                )
            raise ExportFailed(
                f"{self._where(node)}: the graph closes over `{node.target}`, which is no tensor of the model"
            )
        self.names[node] = name

    def _subgraph(self, name: str, module: torch.fx.GraphModule) -> SubgraphArgument:
        if name not in self._subgraphs:
            names = [node.name for node in module.graph.find_nodes(op="placeholder")]
            self._subgraphs[name] = GraphEncoder(module, names, self.root, self.strip).encode()
        return SubgraphArgument(name=name)

    def _node(self, node: torch.fx.Node) -> Node:
        op, args = self._operator(node)
        name = node.name
        while name in self._taken:
            name = f"{name}_"
        self._taken.add(name)
        where = self._where(node)
        encoded_args = [encode_argument(arg, self.names, where) for arg in args]
        node_kwargs = {} if node.target in LAUNCHES else node.kwargs
        kwargs = {key: encode_argument(value, self.names, where) for key, value in node_kwargs.items()}
        self.names[node] = name
        source, module = (None, None) if self.strip else self._provenance(node)
        if op == "torch::enter_autocast":
            encoded_args[0] = DeviceArgument(type=str(args[0]))  # type: ignore[arg-type]
            if encoded_args[3] is None:
                # `torch.autocast` reads this when it is made; Dynamo leaves that to the call.
                encoded_args[3] = torch.is_autocast_cache_enabled()
        return Node(
            name=name,
            op=op,
            args=encoded_args,
            kwargs=kwargs,
            meta=encode_meta(node.meta.get("val")),
            source=source,
            module=module,
        )

    def _operator(self, node: torch.fx.Node) -> tuple[str, tuple[Any, ...]]:
        target = node.target
        if isinstance(target, OpOverload):
            schema = target._schema
            name = f"{schema.name}.{schema.overload_name or 'default'}"
            if name.startswith("aten::") and name.removeprefix("aten::") not in allowed_aten_operators():
                raise ExportFailed(
                    f"{self._where(node)}: operator `{name}` is not on the list of operators that a bundle may call. "
                    "Write this part with other operators, or as a custom operator (torch.library.custom_op)"
                )
            self._schemas[name] = str(schema)
            return name, node.args
        if target in _BUILTINS:
            self._check_growth(node)
            name = _BUILTINS[target]
            args = node.args[:1] if name == "python::round" and node.args[1:] == (None,) else node.args
            return f"{name}_digits" if name == "python::round" and len(args) == 2 else name, args
        if target in _FUNCTIONS:
            return _FUNCTIONS[target], node.args
        if target in LAUNCHES:
            return _FUNCTIONS[launched], launch_arguments(node)
        if isinstance(target, HigherOrderOperator) and f"higher_order::{target.name()}" in OPERANDS:
            return f"higher_order::{target.name()}", node.args
        if is_wrap(target):
            return "subclass::wrap", (node.args[0], self._structure(node))
        if isinstance(target, FromLocal):
            return "distributed::from_local", (node.args[0], self._structure(node), node.args[1])
        shown = getattr(target, "__name__", str(target))
        raise ExportFailed(
            f"{self._where(node)}: operator `{shown}` has no representation in a bundle. "
            "Write this part with aten operators, or as a custom operator (torch.library.custom_op)"
        )

    def _structure(self, node: torch.fx.Node) -> int:
        record = encode_subclass(node.meta["val"], self._where(node))
        assert record is not None
        if record not in self._subclasses:
            self._subclasses.append(record)
        return self._subclasses.index(record)

    def _check_growth(self, node: torch.fx.Node) -> None:
        """Refuse operators that make numbers without bound: `2 ** n` and `1 << n`."""
        if node.target not in (operator.pow, operator.lshift) or not isinstance(node.args[1], torch.fx.Node):
            return
        operands = [arg.meta.get("val") if isinstance(arg, torch.fx.Node) else arg for arg in node.args]
        if not any(isinstance(operand, float | torch.SymFloat) for operand in operands):
            raise ExportFailed(
                f"{self._where(node)}: a size as exponent of an integer makes numbers without bound, which a bundle "
                "may not. Use a float as base (`2.0 ** n`), or give the exponent as a number"
            )

    # --- provenance ---------------------------------------------------------------------------------------

    def _provenance(self, node: torch.fx.Node) -> tuple[int | None, int | None]:
        line, module = self._source_line(node), (self._origin(node).meta.get("custom") or {}).get("module") or None
        source = None if line is None else self._sources.setdefault(line, len(self._sources))
        return source, None if module is None else self._modules.setdefault(module, len(self._modules))

    def _origin(self, node: torch.fx.Node) -> torch.fx.Node:
        return self.origins.get((node.meta.get("custom") or {}).get("origin", ""), node)

    def _source_line(self, node: torch.fx.Node) -> SourceLine | None:
        trace = self._origin(node).meta.get("stack_trace") or node.meta.get("stack_trace")
        if trace is None:
            return None
        if trace not in self._source_cache:
            self._source_cache[trace] = source_of(trace, self.root)
        return self._source_cache[trace]

    def _where(self, node: torch.fx.Node) -> str:
        line = self._source_line(node)
        return f"{line.file}:{line.line} in {line.function}" if line else f"node `{node.name}`"


# --- calls of submodules ----------------------------------------------------------------------------------


def with_calls(graph: Graph, forward: ForwardCapture, names: Mapping[torch.fx.Node, Argument]) -> Graph:
    """Return the record of a captured forward graph with the calls of submodules; `names`: of its nodes."""
    times = _times(forward.graph)
    modules = {path: index for index, path in enumerate(graph.modules)}
    calls: list[ModuleCall] = []
    around: list[int] = []
    for index, call in enumerate(forward.function.calls.calls if times == sorted(times) else ()):
        while around and forward.function.calls.calls[around[-1]].end <= call.begin:
            around.pop()
        parent = around[-1] if around else None
        around.append(index)
        module = modules.setdefault(call.path, len(modules))
        begin, end = bisect_left(times, call.begin), bisect_left(times, call.end)
        record = ModuleCall(module=module, begin=begin, end=end, parent=parent)
        try:
            calls.append(_with_structures(record, call, names))
        except ExportFailed as error:
            calls.append(msgspec.structs.replace(record, refusal=first_line(error)))
    return msgspec.structs.replace(graph, modules=tuple(modules), calls=tuple(calls))


def _times(module: torch.fx.GraphModule) -> list[int]:
    """Return when each node was traced; a node inserted later has the time of the node before it."""
    times: list[int] = []
    for node in (node for node in module.graph.nodes if node.op == "call_function"):
        time = (node.meta.get("custom") or {}).get(CLOCK)
        times.append(time if time is not None else times[-1] if times else 0)
    return times


def _with_structures(record: ModuleCall, call: TracedCall, names: Mapping[torch.fx.Node, Argument]) -> ModuleCall:
    if call.refusal is not None or call.arguments is None or call.result is None:
        raise ExportFailed(call.refusal or "it does not return")
    where = f"a call of `{call.path}`"
    known = [None if isinstance(each, torch.fx.Node) and each not in names else each for each in call.values]
    values = [encode_argument(value, names, where) for value in known]
    return msgspec.structs.replace(record, arguments=call.arguments, result=call.result, values=values)
