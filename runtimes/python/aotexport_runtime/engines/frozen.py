"""Native code of an inference graph that holds copies of the weights: it serves while these are as they were loaded.

It is the ONNX model, or the graph by layers of oneDNN: norms folded, weights packed, activations and sums computed with
them. What is computed from weights alone is computed once. Values between layers have channels last.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter, is_
from typing import Any

import torch

from aotexport_runtime.bundle.read import Bundle
from aotexport_runtime.engines.candidates import PACKED
from aotexport_runtime.engines.engine import Native
from aotexport_runtime.engines.onnx.engine import OnnxEngine, is_contiguous
from aotexport_runtime.engines.onnx.session import ModelRuntime, ort_errors
from aotexport_runtime.errors import CheckFailed, NotSupported, first_line
from aotexport_runtime.execution.codegen import Environment, Function, compile_graph
from aotexport_runtime.execution.functional_graph import compile_functional
from aotexport_runtime.execution.matmul import onednn
from aotexport_runtime.guards.arguments import same_layout
from aotexport_runtime.rewrite.layers import ACTIVATIONS, CONVOLUTION, Layer, constants_of, layered
from aotexport_runtime.rewrite.names import BY_STRIDES, impure_nodes
from aotexport_runtime.rewrite.partition import Subgraph, ancestors
from aotexport_runtime.schema.graph import Graph, Node
from aotexport_runtime.schema.program import ArgumentInput, FreshOutput, Program, SizeInput, StateInput
from aotexport_runtime.schema.values import StringArgument, TensorMeta, ValueMeta
from aotexport_runtime.submodules.tables import LoadedState
from aotexport_runtime.values import sizes

log = logging.getLogger("aotexport_runtime")

_version = attrgetter("_version")


class Frozen(Native):
    """Runs an inference graph while the weights are those that were loaded.

    Attributes:
        failure: what it said the last time that it failed; empty: it did not.
    """

    holds_state = True

    def __init__(self, program: Program, weights: LoadedState) -> None:
        """Note the weights.

        Raises:
            NotSupported: the program does more than its graph, or changes of its weights would not be seen.
        """
        functional = program.functional
        assert functional is not None
        fresh = all(isinstance(output, FreshOutput) for output in functional.outputs)
        if not fresh or any(not isinstance(spec, SizeInput) and spec.subclass is not None for spec in program.inputs):
            raise NotSupported("it gives values alone, and the program views, or tensors of classes")
        states = [(index, spec.name) for index, spec in enumerate(program.inputs) if isinstance(spec, StateInput)]
        if any(name not in weights.tensors for _, name in states):
            raise NotSupported(
                "the module is a copy, or was loaded in inference mode, and changes of its weights would not be seen"
            )
        self.failure = ""
        self._indices = [index for index, _ in states]
        self._tensors = [weights.tensors[name][0] for _, name in states]
        self._versions = [weights.tensors[name][1] for _, name in states]
        self._weights = weights
        self._threads = torch.get_num_threads()
        self._strides = [meta.stride if isinstance(meta, TensorMeta) else None for meta in program.outputs]

    def is_held(self) -> bool:
        """Return whether the weights are those of the load, at their versions; see `Native`."""
        if torch.get_num_threads() != self._threads or torch.are_deterministic_algorithms_enabled():
            return False
        return self._weights.hold()

    def filled(self, args: list[Any]) -> list[Any]:
        """Return inputs of a call, some of which may come without the state, with it."""
        for index, tensor in zip(self._indices, self._tensors, strict=True):
            args[index] = tensor
        return args

    def why_not(self, inputs: Sequence[Any], symbols: Mapping[str, int]) -> str | None:
        if torch.are_deterministic_algorithms_enabled():
            return "deterministic algorithms were asked for"
        if torch.get_num_threads() != self._threads:
            return f"it was made for {self._threads} threads"
        # Hundreds of weights: loops of C take half the time.
        same = all(map(is_, map(inputs.__getitem__, self._indices), self._tensors))
        same = same and list(map(_version, self._tensors)) == self._versions
        return None if same else "weights have changed since the load"

    def laid_out(self, results: Sequence[Any], symbols: Mapping[str, int]) -> tuple[Any, ...]:
        """Return results with the strides that eager gives them."""
        return tuple(_laid_out(*pair, symbols) for pair in zip(results, self._strides, strict=True))


def _laid_out(result: Any, stride: Sequence[Any] | None, symbols: Mapping[str, int]) -> Any:
    if stride is None or not isinstance(result, torch.Tensor):
        return result
    expected = [sizes.evaluate(step, symbols) for step in stride]
    if same_layout(result.shape, result.stride(), expected):
        return result
    count = 1 + sum((size - 1) * step for size, step in zip(result.shape, expected, strict=True))
    if count >= result.numel() or not result.numel():
        return torch.empty_strided(result.shape, expected, dtype=result.dtype).copy_(result)
    # Several elements are one in memory, as those of an expanded tensor.
    memory = result.new_empty(count)
    memory[torch.arange(count).as_strided(result.shape, expected)] = result
    return memory.as_strided(result.shape, expected)


class FrozenModel(Frozen):
    """Runs the ONNX model of an inference graph."""

    is_detached = True

    def __init__(self, bundle: Bundle, program: Program, runtime: ModelRuntime, weights: LoadedState) -> None:
        """Open the model.

        Raises:
            BundleInvalid: the model is not the program's.
            NotSupported: there is none, it does more than the graph, or the runtime does not run it here.
        """
        super().__init__(program, weights)
        model = next((model for model in bundle.manifest.onnx if model.program == program.name), None)
        if model is None:
            raise NotSupported("the bundle has no ONNX model of it")
        has_arguments = any(isinstance(spec, ArgumentInput) for spec in program.inputs)
        if not has_arguments or model.updates or model.state_inputs:
            raise NotSupported("the model gives values alone, and the program has no arguments, or changes state")
        self.target = runtime.engine
        self._engine = OnnxEngine(bundle, program, model, runtime, {})
        self._direct = self._engine.direct()
        self._is_contiguous = all(map(is_contiguous, program.outputs))

    def forward_of(self, subgraph: Subgraph, fallback: Callable[[], Function]) -> Function:
        portable, direct, is_contiguous = functools.cache(fallback), self._direct, self._is_contiguous

        def call(args: list[Any], symbols: dict[str, int]) -> tuple[Any, ...]:
            try:
                results = self._engine.run(args, symbols) if direct is None else direct(args)
            except (CheckFailed, *ort_errors()) as error:
                # Operators of torch raise eager's error.
                self.failure = first_line(error)
                log.warning("%s failed, and the graph runs instead: %s", self.target, self.failure)
                return portable()(self.filled(args), symbols)
            args.clear()
            return tuple(results) if is_contiguous and direct is not None else self.laid_out(results, symbols)

        return call


# --- layers of oneDNN ---------------------------------------------------------------------------------------

_SHAPES = 1024
"""Most shapes that a layer takes; others run by torch's operators."""


class PackedGraph(Frozen):
    """Runs an inference graph by packed layers."""

    target = PACKED

    def __init__(
        self, bundle: Bundle, program: Program, environment: Environment, weights: LoadedState, precision: str
    ) -> None:
        """Find the layers; `precision`: of their arithmetic, `bfloat16`; empty: float32.

        Raises:
            NotSupported: it has none, does more than the graph, or torch has no oneDNN here.
        """
        super().__init__(program, weights)
        assert program.functional is not None
        self._graph = graph = bundle.graph(program.name, program.functional.file)
        self._environment, self._label, self._precision = environment, program.name, precision
        whole = Subgraph([value.name for value in graph.inputs], list(graph.nodes), graph.outputs)
        metas: dict[str, ValueMeta] = {value.name: value.meta for value in (*graph.inputs, *graph.nodes)}
        states = [graph.inputs[i].name for i, spec in enumerate(program.inputs) if isinstance(spec, StateInput)]
        if not onednn.available() or any(node.op.startswith(BY_STRIDES) for node in graph.nodes):
            raise NotSupported("torch has no oneDNN here, or the graph reads tensors by their strides")
        if precision and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
            raise NotSupported("this processor has no instructions for bfloat16")
        # Convolutions of bfloat16 that oneDNN leaves to torch have no such sums.
        fixed = constants_of(whole, states, impure_nodes(graph))
        self._layers, self._rest, self._constants = layered(whole, metas, fixed, sums=not precision)
        if not self._layers:
            raise NotSupported("it has no convolution or matmul by a large weight of float32")

    def forward_of(self, subgraph: Subgraph, fallback: Callable[[], Function]) -> Function:
        graph, environment = self._graph, self._environment
        read = [name for layer in self._layers.values() for name in layer.constants]
        values = self._computed(list(dict.fromkeys([*self._constants, *read])))
        layers = {
            name: _layer(layer, values, graph, environment, self._precision) for name, layer in self._layers.items()
        }
        run = compile_functional(graph, self._rest, environment, label=self._label, detached=True, layers=layers)
        constants = [values[name] for name in self._constants]
        memory = {value.untyped_storage().data_ptr() for value in constants if isinstance(value, torch.Tensor)}

        def owned(result: Any) -> Any:
            is_shared = isinstance(result, torch.Tensor) and result.untyped_storage().data_ptr() in memory
            return result.clone() if is_shared else result

        def call(args: list[Any], symbols: dict[str, int]) -> tuple[Any, ...]:
            inputs = [*self.filled(args), *constants]
            args.clear()
            return self.laid_out([owned(result) for result in run(inputs, symbols)], symbols)

        return call

    def _computed(self, names: Sequence[str]) -> dict[str, Any]:
        """Return values that are computed from weights alone."""
        states = {self._graph.inputs[i].name: tensor for i, tensor in zip(self._indices, self._tensors, strict=True)}
        nodes, _ = ancestors(self._graph.nodes, names, set(states), set())
        run = compile_graph(self._graph, nodes, [*states], [*names], self._environment)
        with torch.no_grad():
            return dict(zip(names, run([tensor.detach() for tensor in states.values()], {}), strict=True))


def _layer(
    layer: Layer, values: Mapping[str, Any], graph: Graph, environment: Environment, precision: str
) -> Callable[..., torch.Tensor]:
    """Return a function that computes a layer from its inputs.

    The first call with inputs of these shapes runs torch's operators too: they raise eager's errors, and what they took
    keeps oneDNN within its bounds.
    """
    root, last, names = layer.nodes[0], [layer.nodes[-1].name], layer.constants
    constants = [values[name] for name in names]
    operators = compile_graph(graph, layer.nodes, [*layer.inputs, *names], [*last, root.name], environment)
    known: set[Any] = set()

    @functools.cache
    def packed() -> Callable[..., torch.Tensor]:
        make = _convolution if root.op == CONVOLUTION else _linear
        return make(layer, values, torch.bfloat16 if precision else torch.float32)

    def call(*inputs: torch.Tensor) -> torch.Tensor:
        key = tuple([(value.shape, value.dtype) for value in inputs])
        if key not in known:
            result, begun = operators([*inputs, *constants], {})
            if len(known) == _SHAPES or any(value.shape != begun.shape for value in inputs[1:]):
                return result
            known.add(key)
        return packed()(*inputs)

    return call


def _linear(layer: Layer, values: Mapping[str, torch.Tensor], dtype: torch.dtype) -> Callable[..., torch.Tensor]:
    weight = torch.ops.mkldnn._reorder_linear_weight(values[layer.weight].t().to(dtype).contiguous())
    bias = None if layer.bias is None else values[layer.bias].to(dtype).contiguous()
    after = _activation(layer.activation)
    linear = torch.ops.mkldnn._linear_pointwise.default
    if dtype == torch.float32:
        return lambda rows: linear(rows, weight, bias, *after)
    return lambda rows: linear(rows.to(dtype), weight, bias, *after).to(rows.dtype)


def _convolution(layer: Layer, values: Mapping[str, torch.Tensor], dtype: torch.dtype) -> Callable[..., torch.Tensor]:
    *_, stride, padding, dilation, _, _, groups = layer.nodes[0].args
    assert isinstance(stride, list)
    assert isinstance(padding, list)
    assert isinstance(dilation, list)
    weight = values[layer.weight]
    bias = None if layer.bias is None else values[layer.bias]
    if layer.norm is not None:
        weight, bias = _folded(layer.norm, weight, bias, values)
    is_line = weight.dim() == 3  # Convolutions over one axis are those over two of which one has size 1.
    if is_line:
        weight, stride, padding, dilation = weight.unsqueeze(2), [1, *stride], [0, *padding], [1, *dilation]
    packed = torch.ops.mkldnn._reorder_convolution_weight(weight.to(dtype), padding, stride, dilation, groups)
    bias = None if bias is None else bias.to(dtype)
    settings, after = (padding, stride, dilation, groups), _activation(layer.activation)
    convolution = torch.ops.mkldnn._convolution_pointwise

    def run(source: torch.Tensor, other: torch.Tensor | None = None) -> torch.Tensor:
        if is_line:
            source, other = source.unsqueeze(2), None if other is None else other.unsqueeze(2)
        source = source.to(dtype, memory_format=torch.channels_last)
        if other is None:
            result = convolution.default(source, packed, bias, *settings, *after)
        else:
            unary = after if after[0] != "none" else (None, [], None)
            result = convolution.binary(source, other.to(dtype), packed, bias, *settings, "add", 1.0, *unary)
        result = result.to(torch.float32)
        return result.squeeze(2) if is_line else result

    return run


def _folded(
    norm: Node, weight: torch.Tensor, bias: torch.Tensor | None, values: Mapping[str, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return weight and bias of a convolution that computes the batch norm of its result too."""
    scale, shift, mean, variance = (None if name is None else values[str(name)].double() for name in norm.args[1:5])
    assert mean is not None
    assert variance is not None
    assert isinstance(norm.args[6], float | int)
    factor = torch.rsqrt(variance + norm.args[6])
    factor = factor if scale is None else factor * scale
    moved = (0 if bias is None else bias.double()) - mean
    moved = moved * factor if shift is None else moved * factor + shift
    return (weight * factor.reshape(-1, *[1] * (weight.dim() - 1))).float(), moved.float()


def _activation(node: Node | None) -> tuple[str, list[Any], str]:
    """Return an activation as oneDNN takes it: name, numbers, algorithm."""
    if node is None:
        return "none", [], ""
    name, numbers = ACTIVATIONS[node.op], [*node.args[1:]]
    if name == "gelu":
        kind = node.kwargs.get("approximate", StringArgument(value="none"))
        assert isinstance(kind, StringArgument)
        return name, [], kind.value
    defaults = {"hardtanh": [-1, 1], "leaky_relu": [0.01]}.get(name, [])
    return name, [*numbers, *defaults[len(numbers) :]], ""
