"""Straight-line graphs to Python functions.

The generated source holds validated values alone: positions, integers, finite floats, booleans and signs of a fixed
table. Names and strings of the bundle never reach it; they become entries of a constant table.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
from torch.autograd import profiler

from aotexport_runtime.allowed.operators import INFIX
from aotexport_runtime.errors import printable
from aotexport_runtime.execution import attention, checks, higher_order, loops, ops
from aotexport_runtime.execution.checkpoint import outlined
from aotexport_runtime.execution.matmul.sizes import Mode
from aotexport_runtime.execution.preconditions.dataflow import are_indices_proven
from aotexport_runtime.execution.source import define
from aotexport_runtime.rewrite import impure
from aotexport_runtime.rewrite.names import names_in, operands
from aotexport_runtime.schema.graph import Graph, Node, SourceLine
from aotexport_runtime.schema.limits import DEFAULT, Limits
from aotexport_runtime.schema.subclasses import Subclass
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
from aotexport_runtime.validate.targets import KERNEL
from aotexport_runtime.values import dtypes, meshes, sizes
from aotexport_runtime.values.subclasses import Form, TensorTypes, inner_tensor
from aotexport_runtime.values.trees import python_value

_FUNCTIONS: dict[str, Callable[..., Any]] = {
    **higher_order.EFFECTS,
    "subclass::inner": inner_tensor,
    "distributed::to_local": meshes.to_local,
    "distributed::redistribute": meshes.redistribute,
}
"""Operators that are functions of the runtime, of a node's values alone."""

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
        return None if self.device is None else attention.replacement(name, self.device.type)

    def form(self, record: Subclass) -> Form:
        """Return the structure of a tensor subclass with its class."""
        return Form(record, self.tensor_types, lambda leaf: constant_value(leaf.value, self))


@dataclass
class _FunctionSource:
    """A function under construction: its lines, and the table of objects that they refer to."""

    graph: Graph
    environment: Environment
    budget: loops.Budget
    replacements: Mapping[str, Callable[..., Any]]
    lines: list[str] = field(default_factory=list)
    original_lines: dict[int, SourceLine] = field(default_factory=dict[int, SourceLine])
    objects: dict[str, Any] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)
    operators: dict[str, Callable[..., Any]] = field(default_factory=dict)
    functions: dict[str, str] = field(default_factory=dict)
    constants: dict[tuple[type, Any], str] = field(default_factory=dict)
    subgraphs: dict[str, str] = field(default_factory=dict)
    drawing: dict[str, bool] = field(default_factory=dict)

    def local(self, name: str) -> str:
        """Return the local variable of value `name`, made on first use."""
        variable = self.names.get(name)
        if variable is None:
            variable = self.names[name] = f"v{len(self.names)}"
        return variable

    def constant(self, value: Any) -> str:
        """Return the global that holds the hashable `value`."""
        key = (type(value), value)
        if key not in self.constants:
            self.constants[key] = self.object("c", value)
        return self.constants[key]

    def object(self, prefix: str, value: Any) -> str:
        """Return a new global that holds `value`."""
        name = f"{prefix}{len(self.objects)}"
        self.objects[name] = value
        return name

    def function(self, node: Node) -> str:
        """Return the global that holds the function for the operator of `node`."""
        if node.op.startswith(KERNEL):
            return self.object("k", self.environment.kernels[node.op.removeprefix(KERNEL)])
        if node.op not in self.operators:
            unguarded = self.environment.unguarded
            found = ops.overload if unguarded else ops.resolve
            resolved = found(node.op, self.graph.schemas.get(node.op), self.environment.namespaces)
            self.operators[node.op] = resolved
            replacement = self.environment.replacement(node.op)
            direct = ops.direct(node.op, unguarded=unguarded)
            self.functions[node.op] = self.object("f", replacement or direct or resolved)
        operator = self.operators[node.op]
        if node.name in self.replacements:
            return self.object("p", self.replacements[node.name])
        if not self.environment.unguarded and are_indices_proven(self.graph, node):
            schema = self.graph.schemas.get(node.op)
            return self.object("f", ops.resolve(node.op, schema, self.environment.namespaces, proven=True))
        declared = getattr(operator, "_schema", None)
        if isinstance(node.meta, SequenceMeta) and declared is not None and len(declared.returns) == 1:
            function = self.objects[self.functions[node.op]]
            return self.object("f", loops.counted(node.op, function, len(node.meta.items)))
        return self.functions[node.op]

    def check(self, name: str, meta: ValueMeta) -> None:
        """Write that a value that comes from elsewhere is what its metadata says, if it may be a number."""
        if checks.has_numbers(meta):
            self.lines.append(f"{self.constant(checks.checked)}({self.local(name)}, {self.object('d', meta)})")

    def subgraph(self, name: str) -> str:
        """Return the global that holds the compiled subgraph `name`."""
        if name not in self.subgraphs:
            graph = self.graph.subgraphs[name]
            inputs = [graph_input.name for graph_input in graph.inputs]
            self.subgraphs[name] = self.object(
                "g", compile_graph(graph, graph.nodes, inputs, graph.outputs, self.environment, budget=self.budget)
            )
        return self.subgraphs[name]


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
    budget: loops.Budget | None = None,
) -> Function:
    """Return a function that computes `outputs` from `inputs` by `nodes`, dropping each value at its last use.

    Args:
        graph: where schemas and subgraphs are found.
        nodes: operator calls, in an order of execution.
        inputs: names of the values that the function takes.
        outputs: the values that the function returns.
        environment: see `Environment`.
        label: shown in tracebacks and profiles; None: it is a subgraph of another function.
        detached: outputs that may be views, and are detached from their bases.
        replacements: of matmuls that another library may compute, by name of the value.
        budget: what the bodies of a call may run; None: the function begins a call.

    Raises:
        BundleInvalid: an operator is not allowed.
        NotSupported: an operator is missing in this torch.
    """
    graph, nodes = outlined(graph, list(nodes), outputs)
    bodies = budget or loops.Budget(environment.limits.calls)
    source = _FunctionSource(graph, environment, bodies, replacements)
    taken = [source.local(name) for name in inputs]
    if label is not None:
        profiled, mark, text = (source.constant(value) for value in (is_profiled, marked, label))
        source.lines.append(f"if not is_marked and {profiled}():")
        source.lines.append(f"    return {mark}({text}, run, args, symbols, True)")
    if budget is not None:
        source.lines.append(f"{source.object('b', budget.spend)}({len(nodes) + 1})")
    elif graph.subgraphs:
        source.lines.append(f"{source.object('b', bodies.begin)}()")
    if taken:
        source.lines.append(f"{', '.join(taken)}, = args")
    source.lines.append("args.clear()")
    shown = checks.shown_values(nodes)
    last_uses = _last_uses(nodes, outputs, shown)
    unused = [name for name in inputs if name not in last_uses]
    _drop(source, unused)
    for graph_input in graph.inputs:
        if graph_input.name in last_uses and graph_input.name in source.names:
            source.check(graph_input.name, graph_input.meta)
    dying: dict[int, list[str]] = {}
    for name, index in last_uses.items():
        dying.setdefault(index, []).append(name)
    for index, node in enumerate(nodes):
        if node.source is not None and graph.sources:
            source.original_lines[len(source.lines)] = graph.sources[node.source]
        made = _check(source, node, shown) if node.name in shown else _expression(source, node)
        source.lines.append(f"{source.local(node.name)} = {made}")
        if not node.op.startswith(_TRUSTED):
            source.check(node.name, node.meta)
        dead = dying.get(index, [])
        if node.name not in last_uses and node.op not in higher_order.EFFECTS:
            dead = [*dead, node.name]
        _drop(source, dead)
    returned = "".join(f"{_output(source, output, detached)}, " for output in outputs)
    source.lines.append(f"return ({returned})")
    source.objects.update(sizes.SCOPE)
    parameters, shown_as = "args, symbols, is_marked=False", label or "graph"
    return define("run", parameters, source.lines, source.objects, shown_as, source.original_lines)


def is_profiled() -> bool:
    """Return whether `torch.profiler` is active; torch has no public way to ask."""
    return getattr(profiler, "_is_profiler_enabled", False)


def marked(label: str, run: Callable[..., Any], *args: Any) -> Any:
    """Return `run(*args)`, marked as `label` in the active profiler's trace."""
    with profiler.record_function(f"aotexport: {label}"):
        return run(*args)


def _last_uses(nodes: Sequence[Node], outputs: Sequence[Argument], shown: Mapping[str, list[str]]) -> dict[str, int]:
    """Return per value the index of the node that uses it last; `len(nodes)` for returned ones."""
    uses: dict[str, int] = {}
    for index, node in enumerate(nodes):
        uses.update(dict.fromkeys((*shown.get(node.name, ()), *operands(node)), index))
    return uses | dict.fromkeys(names_in(outputs), len(nodes))


def _drop(source: _FunctionSource, names: Iterable[str]) -> None:
    variables = [source.local(name) for name in names]
    if variables:
        source.lines.append(f"del {', '.join(variables)}")


def _check(source: _FunctionSource, node: Node, shown: Mapping[str, list[str]]) -> str:
    source.function(node)
    where = source.constant(checks.place(source.graph, node))
    condition, message = [_argument(source, argument) for argument in node.args]
    values = ", ".join(source.local(name) for name in shown[node.name])
    function = source.constant(checks.check)
    return f"{function}({condition}, {message}, {where}, {values})"


def _expression(source: _FunctionSource, node: Node) -> str:
    arguments = [_argument(source, _shown(argument, node)) for argument in node.args]
    listed = ", ".join(arguments)
    if node.op in INFIX and len(arguments) == 2:
        return f"({arguments[0]}) {INFIX[node.op]} ({arguments[1]})"
    if node.op == "python::getitem" and len(arguments) == 2:
        return f"{arguments[0]}[{arguments[1]}]"
    if node.op in _FUNCTIONS:
        return f"{source.object('f', _FUNCTIONS[node.op])}({listed})"
    if node.op == CALL_SUBMODULE:
        return f"{source.object('m', source.environment.submodules[node.name])}(symbols, {listed})"
    if node.op in ("subclass::wrap", "distributed::from_local"):
        assert isinstance(node.args[1], int)
        form = source.object("t", source.environment.form(source.graph.subclasses[node.args[1]]))
        if node.op == "subclass::wrap":
            return f"{form}.make(iter({arguments[0]}), symbols)"
        return f"{form}.make(iter([{arguments[0]}]), symbols, {arguments[2]})"
    if node.op in higher_order.OPERATORS:
        operators = higher_order.DRAWING if impure.draws(source.graph, node, source.drawing) else higher_order.OPERATORS
        operator = loops.limited(node.op, operators[node.op], source.environment.limits.iterations)
        return f"{source.object('f', operator)}(symbols, {listed})"
    arguments += [f"{keyword}={_argument(source, argument)}" for keyword, argument in node.kwargs.items()]
    return f"{source.function(node)}({', '.join(arguments)})"


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


def _output(source: _FunctionSource, output: Argument, detached: Container[str]) -> str:
    value = _argument(source, output)
    return f"{source.constant(without_base)}({value})" if isinstance(output, str) and output in detached else value


def _argument(source: _FunctionSource, argument: Argument) -> str:
    if isinstance(argument, str):
        return source.local(argument)
    if argument is None or isinstance(argument, int):
        return repr(argument)
    if isinstance(argument, float):
        return repr(argument) if math.isfinite(argument) else source.constant(argument)
    if isinstance(argument, list):
        return f"[{', '.join([_argument(source, item) for item in argument])}]"
    if isinstance(argument, SizeArgument):
        return sizes.source(argument.value, lambda symbol: f"symbols[{source.constant(symbol)}]")
    if isinstance(argument, SubgraphArgument):
        return source.subgraph(argument.name)
    if isinstance(argument, SliceArgument):
        parts = [_argument(source, part) for part in (argument.start, argument.stop, argument.step)]
        return f"slice({', '.join(parts)})"
    return source.constant(constant_value(argument, source.environment))


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
    if isinstance(argument, LayoutArgument):
        return dtypes.layout(argument.value)
    if isinstance(argument, MemoryFormatArgument):
        return dtypes.MEMORY_FORMATS[argument.value]
    if isinstance(argument, list):
        return [constant_value(item, environment) for item in argument]
    if isinstance(argument, SliceArgument):
        return slice(argument.start, argument.stop, argument.step)
    assert argument is None or isinstance(argument, bool | int | float)
    return argument
