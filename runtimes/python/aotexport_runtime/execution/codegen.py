"""Straight-line graphs to Python functions.

The generated source holds validated values alone: positions, integers, finite floats, booleans and signs of a fixed
table. Names and strings of the bundle never reach it; they become entries of a constant table.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd import profiler

from aotexport_runtime.allowed.operators import INFIX, KERNEL
from aotexport_runtime.allowed.signatures import signature_of
from aotexport_runtime.errors import printable
from aotexport_runtime.execution import checks, ops
from aotexport_runtime.execution.matmul.sizes import Mode
from aotexport_runtime.execution.source import Origin, define, origin_of
from aotexport_runtime.rewrite.names import ENTER_CHECKPOINT, FLOATS, draws, last_uses
from aotexport_runtime.rewrite.simplify import ASSUMED_SHAPE
from aotexport_runtime.rewrite.updates import UPDATE
from aotexport_runtime.schema.graph import Graph, Node, Subclass
from aotexport_runtime.schema.limits import DEFAULT, Limits
from aotexport_runtime.schema.trees import PythonValue
from aotexport_runtime.schema.values import (
    Argument,
    ComplexArgument,
    DeviceArgument,
    DTypeArgument,
    FloatArgument,
    LayoutArgument,
    MemoryFormatArgument,
    SequenceMeta,
    SizeArgument,
    SliceArgument,
    StringArgument,
    SubgraphArgument,
    ValueMeta,
)
from aotexport_runtime.values import dtypes, sizes
from aotexport_runtime.values.subclasses import Form, TensorTypes, inner_tensor
from aotexport_runtime.values.trees import python_value

if TYPE_CHECKING:
    from aotexport_runtime.execution.loops import Budget

Function = Callable[[list[Any], dict[str, int]], tuple[Any, ...]]
"""A compiled graph: called with the list of inputs (emptied by the call) and the value of each symbol."""


_TRUSTED = ("python::", "torch::", "submodule::")
"""Namespaces whose results are bounded when the graph is checked, or made by code of the caller."""

CALL_SUBMODULE = "submodule::call"
"""Operator of nodes that call a submodule in the place of its captured nodes; its arguments are those of the call."""


@dataclass(frozen=True)
class Environment:
    """The environment of a program: namespaces, device and options that compiling its graphs needs.

    Attributes:
        namespaces: operator namespaces that the caller allowed beside `aten`.
        device: where the bundle was loaded to; None: the device class of the capture.
        tensor_types: classes of tensors, and of objects in their contexts, that the caller gave.
        lowering: returns the lowered form of a program (`CudaEngine`); None: functional graphs run as they are.
        kernels: launcher of each kernel, by name; of lowered graphs.
        memory_budget: the part of the saved tensors' memory that forward may save; backward recomputes the rest.
        matmul: which library computes matmuls; `torch`: the one that torch's operators call.
        submodules: function that calls each submodule that changed, by name of the node.
        limits: the most that a call may ask for.
        unguarded: whether operators run without their preconditions: beside native code, which the caller trusts.
    """

    namespaces: frozenset[str] = frozenset()
    device: torch.device | None = None
    tensor_types: TensorTypes = field(default_factory=TensorTypes)
    lowering: Callable[..., Any] | None = None
    kernels: Mapping[str, Callable[..., None]] = field(default_factory=dict[str, Callable[..., None]])
    memory_budget: float = 1
    matmul: Mode = "torch"
    submodules: Mapping[str, Callable[..., Any]] = field(default_factory=dict[str, Callable[..., Any]])
    limits: Limits = DEFAULT
    unguarded: bool = False

    def place(self, device_type: str) -> torch.device:
        """Return the device for a device class of the capture."""
        return self.device if self.device is not None else torch.device(device_type)

    def replacement(self, name: str) -> Callable[..., Any] | None:
        """Return the replacement of operator `name` on the bundle's device; None: the operator itself runs."""
        if self.device is None or not name.startswith("aten::_scaled_dot_product_"):
            return None
        from aotexport_runtime.execution.attention import replacement

        return replacement(name, self.device.type)

    def form(self, record: Subclass) -> Form:
        """Return the structure of a tensor subclass with its class."""
        return Form(record, self.tensor_types, lambda leaf: constant_value(leaf.value, self))


@dataclass
class _FunctionSource:
    """A function under construction: its lines, and the table of objects that they refer to."""

    graph: Graph
    environment: Environment
    budget: Budget | None
    replacements: Mapping[str, Callable[..., Any]]
    detached: Container[str]
    lines: list[str] = field(default_factory=list)
    origins: dict[int, Origin] = field(default_factory=dict[int, Origin])
    objects: dict[str, Any] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)
    shared: dict[Any, str] = field(default_factory=dict)
    drawing: dict[str, bool] = field(default_factory=dict)

    def local(self, name: str) -> str:
        """Return the local variable of value `name`, made on first use."""
        variable = self.names.get(name)
        if variable is None:
            variable = self.names[name] = f"v{len(self.names)}"
        return variable

    def object(self, prefix: str, value: Any) -> str:
        """Return a new global that holds `value`."""
        name = f"{prefix}{len(self.objects)}"
        self.objects[name] = value
        return name

    def once(self, prefix: str, key: Hashable, make: Callable[[], Any]) -> str:
        """Return the global of `key`; the first time, one that holds what `make` returns."""
        if key not in self.shared:
            self.shared[key] = self.object(prefix, make())
        return self.shared[key]

    def constant(self, value: Any) -> str:
        """Return the global that holds the hashable `value`."""
        return self.once("c", (type(value), value), lambda: value)

    def body(self, nodes: Sequence[Node], inputs: Sequence[str], outputs: Sequence[Argument]) -> None:
        """Write that `inputs` are taken, nodes run, values are dropped at their last use, and `outputs` returned."""
        if taken := [self.local(name) for name in inputs]:
            self.lines.append(f"{', '.join(taken)}, = args")
        self.lines.append("args.clear()")
        shown = checks.shown_values(nodes)
        uses = last_uses(nodes, outputs, shown)
        self.drop(name for name in inputs if name not in uses)
        for graph_input in self.graph.inputs:
            if graph_input.name in uses and graph_input.name in self.names:
                self.check(graph_input.name, graph_input.meta)
        dying: dict[int, list[str]] = {}
        for name, index in uses.items():
            dying.setdefault(index, []).append(name)
        for index, node in enumerate(nodes):
            self.compute(node, shown)
            is_unused = node.name not in uses and not node.op.startswith("torch::")
            self.drop([*dying.get(index, ()), *[node.name] * is_unused])
        self.lines.append(f"return ({''.join(f'{self.output(output)}, ' for output in outputs)})")

    def drop(self, names: Iterable[str]) -> None:
        """Write that values are no longer needed."""
        if variables := [self.local(name) for name in names]:
            self.lines.append(f"del {', '.join(variables)}")

    def check(self, name: str, meta: ValueMeta) -> None:
        """Write that a value that comes from elsewhere is what its metadata says, if it may be a number."""
        if checks.has_numbers(meta):
            self.lines.append(f"{self.constant(checks.checked)}({self.local(name)}, {self.object('d', meta)})")

    def compute(self, node: Node, shown: Mapping[str, Sequence[str]]) -> None:
        """Write that the value of a node is computed, and that it is checked; `shown`: see `checks.shown_values`."""
        self.origins[len(self.lines)] = origin_of(node, self.graph)
        made = self.checking(node, shown[node.name]) if node.name in shown else self.expression(node)
        self.lines.append(f"{self.local(node.name)} = {made}")
        if not node.op.startswith(_TRUSTED):
            self.check(node.name, node.meta)

    def function(self, node: Node) -> str:
        """Return the global that holds the function for the operator of `node`."""
        op, environment, schema = node.op, self.environment, self.graph.schemas.get(node.op)
        if op.startswith(KERNEL):
            return self.object("k", environment.kernels[op.removeprefix(KERNEL)])
        if node.name in self.replacements:
            return self.object("p", self.replacements[node.name])

        is_direct = len(node.args) <= ops.POSITIONAL.get(op, len(node.args))

        def operator() -> Callable[..., Any]:
            find = ops.overload if environment.unguarded else ops.resolve
            found = find(op, schema, environment.namespaces)
            direct = ops.direct(op, unguarded=environment.unguarded) if is_direct else None
            return environment.replacement(op) or direct or found

        shared = self.once("f", (op, is_direct), operator)
        signature = signature_of(schema) if schema is not None and isinstance(node.meta, SequenceMeta) else None
        if isinstance(node.meta, SequenceMeta) and signature is not None and len(signature.returns) == 1:
            from aotexport_runtime.execution.loops import counted

            return self.object("f", counted(op, self.objects[shared], len(node.meta.items)))
        return shared

    def subgraph(self, name: str) -> str:
        """Return the global that holds the compiled subgraph `name`."""
        graph = self.graph.subgraphs[name]
        inputs = [graph_input.name for graph_input in graph.inputs]
        return self.once(
            "g",
            ("subgraph", name),
            lambda: compile_graph(graph, graph.nodes, inputs, graph.outputs, self.environment, budget=self.budget),
        )

    def checking(self, node: Node, compared: Sequence[str]) -> str:
        """Return the expression of a check on the values `compared`."""
        given = [self.argument(argument) for argument in node.args]
        shown = [self.constant(checks.place(self.graph, node)), *map(self.local, compared)]
        return f"{self.constant(checks.check)}({', '.join([*given, *shown])})"

    def expression(self, node: Node) -> str:
        """Return the expression of the value of a node."""
        op, arguments = node.op, [self.argument(_shown(argument, node)) for argument in node.args]
        listed = ", ".join(arguments)
        if op in INFIX and len(arguments) == 2:
            return f"({arguments[0]}) {INFIX[op]} ({arguments[1]})"
        if op == "python::getitem" and len(arguments) == 2:
            return f"{arguments[0]}[{arguments[1]}]"
        if (function := _own_function(op)) is not None:
            return f"{self.object('f', function)}({listed})"
        if op == CALL_SUBMODULE:
            return f"{self.object('m', self.environment.submodules[node.name])}(symbols, {listed})"
        if op in ("subclass::wrap", "distributed::from_local"):
            assert isinstance(node.args[1], int)
            form = self.object("t", self.environment.form(self.graph.subclasses[node.args[1]]))
            if op == "subclass::wrap":
                return f"{form}.make(iter({arguments[0]}), symbols)"
            return f"{form}.make(iter([{arguments[0]}]), symbols, {arguments[2]})"
        if op.startswith("higher_order::"):
            from aotexport_runtime.execution.higher_order import DRAWING, OPERATORS
            from aotexport_runtime.execution.loops import limited

            operator = (DRAWING if draws(self.graph, node, self.drawing) else OPERATORS)[op]
            function = limited(op, operator, self.environment.limits.iterations)
            return f"{self.object('f', function)}(symbols, {listed})"
        arguments += [f"{keyword}={self.argument(argument)}" for keyword, argument in node.kwargs.items()]
        return f"{self.function(node)}({', '.join(arguments)})"

    def output(self, output: Argument) -> str:
        """Return the expression of a result."""
        value = self.argument(output)
        is_detached = isinstance(output, str) and output in self.detached
        return f"{self.constant(without_base)}({value})" if is_detached else value

    def argument(self, argument: Argument) -> str:
        """Return the expression of an argument."""
        if isinstance(argument, str):
            return self.local(argument)
        if argument is None or isinstance(argument, int) or (isinstance(argument, float) and math.isfinite(argument)):
            return repr(argument)
        if isinstance(argument, list):
            return f"[{', '.join([self.argument(item) for item in argument])}]"
        if isinstance(argument, SizeArgument):
            return sizes.source(argument.value, lambda symbol: f"symbols[{self.constant(symbol)}]")
        if isinstance(argument, SubgraphArgument):
            return self.subgraph(argument.name)
        if isinstance(argument, SliceArgument):
            return f"slice({', '.join(map(self.argument, (argument.start, argument.stop, argument.step)))})"
        return self.constant(constant_value(argument, self.environment))


def compile_graph(
    graph: Graph,
    nodes: Iterable[Node],
    inputs: Sequence[str],
    outputs: Sequence[Argument],
    environment: Environment,
    *,
    label: str | None = None,
    detached: Container[str] = (),
    replacements: Mapping[str, Callable[..., Any]] = MappingProxyType({}),
    budget: Budget | None = None,
) -> Function:
    """Return a function that computes `outputs` from `inputs` by `nodes`, dropping each value at its last use.

    `nodes` are in an order of execution; `graph` has their schemas and subgraphs. `label` is shown in tracebacks and
    profiles; None: it is a subgraph of another function. `detached`: outputs that may be views, and are detached from
    their bases. `replacements`: functions in place of operators, by name of the value. `budget`: what the bodies of a
    call may run; None: the function begins a call.

    Raises:
        BundleInvalid: an operator is not allowed.
        NotSupported: an operator is missing in this torch.
    """
    nodes, bodies = list(nodes), budget
    if budget is None and any(getattr(value.meta, "dtype", None) == "int8" for value in graph.inputs):
        from aotexport_runtime.execution.checkpoint import with_computed_weights

        nodes = with_computed_weights(graph, nodes)
    if any(node.op == ENTER_CHECKPOINT for node in nodes):
        from aotexport_runtime.execution.checkpoint import outlined

        graph, nodes = outlined(graph, nodes, outputs)
    if budget is None and graph.subgraphs:
        from aotexport_runtime.execution.loops import Budget

        bodies = Budget(environment.limits.calls)
    source = _FunctionSource(graph, environment, bodies, replacements, detached)
    lines = source.lines
    if budget is not None:
        lines.append(f"{source.object('b', budget.spend)}({len(nodes) + 1})")
    elif bodies is not None:
        lines.append(f"{source.object('b', bodies.begin)}()")
    source.body(nodes, inputs, outputs)
    source.objects.update(sizes.SCOPE)
    run: Function = define("run", "args, symbols", lines, source.objects, label or "graph", source.origins)
    return run if label is None else marked(label, run)


def _own_function(op: str) -> Callable[..., Any] | None:
    """Return the function of the runtime that an operator is, of a node's values alone; None: it is none."""
    if op.startswith("torch::"):
        from aotexport_runtime.execution.higher_order import EFFECTS

        return EFFECTS[op]
    if op in ("distributed::to_local", "distributed::redistribute"):
        from aotexport_runtime.values import meshes

        return meshes.to_local if op == "distributed::to_local" else meshes.redistribute
    if op == UPDATE:
        from aotexport_runtime.execution.updates import adam

        return adam
    if op == FLOATS:
        from aotexport_runtime.execution.checkpoint import floats

        return floats
    return {ASSUMED_SHAPE: checks.check_shape, "subclass::inner": inner_tensor}.get(op)


def marked(label: str, run: Callable[..., Any]) -> Callable[..., Any]:
    """Return `run`, whose calls are marked as `label` in the trace of an active profiler."""

    def call(*args: Any) -> Any:
        if not getattr(profiler, "_is_profiler_enabled", False):  # torch has no public way to ask.
            return run(*args)
        with profiler.record_function(f"aotexport: {label}"):
            return run(*args)

    return call


def _shown(argument: Argument, node: Node) -> Argument:
    """Return an argument of a node; torch shows the texts of checks, in which a terminal obeys nothing."""
    if isinstance(argument, StringArgument) and node.op.startswith(("aten::_assert", "aten::_functional_assert")):
        return StringArgument(value=printable(argument.value))
    return argument


def without_base(value: Any) -> Any:
    """Return a tensor that is no view; a view is detached from its base, and shares its memory and version.

    Autograd refuses to let a caller change views that a custom function returns. Operators may return no tensor where
    their metadata promises one (workspaces that a kernel does not use).
    """
    return value.detach() if isinstance(value, torch.Tensor) and value._is_view() else value


def constant_value(argument: Argument | PythonValue, environment: Environment) -> Any:
    """Return the Python value of an argument that refers to no value of a graph, or of a constant of a tree."""
    if isinstance(argument, PythonValue):
        return python_value(argument)
    if isinstance(argument, StringArgument):
        return argument.value
    if isinstance(argument, FloatArgument):
        return float(argument.value)
    if isinstance(argument, ComplexArgument):
        parts = (argument.real, argument.imag)
        return complex(*(float(part.value if isinstance(part, FloatArgument) else part) for part in parts))
    if isinstance(argument, DTypeArgument):
        return dtypes.dtype(argument.value)
    if isinstance(argument, DeviceArgument):
        return environment.place(argument.type)
    if isinstance(argument, LayoutArgument | MemoryFormatArgument):
        return getattr(torch, argument.value)
    if isinstance(argument, list):
        return [constant_value(item, environment) for item in argument]
    if isinstance(argument, SliceArgument):
        return slice(argument.start, argument.stop, argument.step)
    assert argument is None or isinstance(argument, bool | int | float)
    return argument
