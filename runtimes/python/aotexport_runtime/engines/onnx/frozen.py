"""The ONNX model of an inference graph, as native code of it. It holds a copy of the weights."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from aotexport_runtime.bundle.read import Bundle
from aotexport_runtime.engines.onnx.engine import OnnxEngine
from aotexport_runtime.engines.onnx.session import ModelRuntime, ort_errors
from aotexport_runtime.errors import CheckFailed, NotSupported, first_line
from aotexport_runtime.execution.codegen import Function
from aotexport_runtime.guards.arguments import same_layout
from aotexport_runtime.rewrite.partition import Subgraph
from aotexport_runtime.schema.program import ArgumentInput, FreshOutput, Program, SizeInput, StateInput
from aotexport_runtime.schema.values import TensorMeta
from aotexport_runtime.values import sizes

log = logging.getLogger("aotexport_runtime")

Weights = Mapping[str, tuple[torch.Tensor, int]]
"""State tensors as they were loaded, and their versions then, by name."""


class FrozenModel:
    """Runs an inference graph while the weights are those that were loaded; see `Libraries`.

    `failure` is what the runtime said the last time that it failed; empty: it did not.
    """

    def __init__(self, bundle: Bundle, program: Program, runtime: ModelRuntime, weights: Weights) -> None:
        """Open the model.

        Raises:
            BundleInvalid: the model is not the program's.
            NotSupported: there is none, it does more than the graph, or the runtime does not run it here.
        """
        model = next((model for model in bundle.manifest.onnx if model.program == program.name), None)
        if model is None:
            raise NotSupported("the bundle has no ONNX model of it")
        functional = program.functional
        assert functional is not None
        arguments = [spec for spec in program.inputs if isinstance(spec, ArgumentInput)]
        fresh = all(isinstance(output, FreshOutput) for output in functional.outputs)
        wraps = any(not isinstance(spec, SizeInput) and spec.subclass is not None for spec in program.inputs)
        if not fresh or wraps or not arguments or model.updates or model.state_inputs:
            raise NotSupported("the model gives values alone, and the program views, changes or tensors of classes")
        states = [(index, spec.name) for index, spec in enumerate(program.inputs) if isinstance(spec, StateInput)]
        if any(name not in weights for _, name in states):
            raise NotSupported(
                "the module is a copy, or was loaded in inference mode, and changes of its weights would not be seen"
            )
        self.target = runtime.engine
        self.failure = ""
        self._weights = [(index, *weights[name]) for index, name in states]
        self._threads = torch.get_num_threads()
        self._strides = [meta.stride if isinstance(meta, TensorMeta) else None for meta in program.outputs]
        self._engine = OnnxEngine(bundle, program, model, runtime, {})

    def why_not(self, inputs: Sequence[Any], symbols: Mapping[str, int]) -> str | None:
        """Return which of weights, threads and modes is not that which the model was opened with; None: none."""
        if torch.are_deterministic_algorithms_enabled():
            return "deterministic algorithms were asked for"
        if torch.get_num_threads() != self._threads:
            return f"the model was opened for {self._threads} threads"
        same = all(inputs[index] is tensor and tensor._version == version for index, tensor, version in self._weights)
        return None if same else "weights have changed since the load"

    def forward(self, subgraph: Subgraph, fallback: Callable[[], Function]) -> Function:
        """Return a function that runs the graph; where the runtime fails, the function that `fallback` makes."""
        portable = functools.cache(fallback)

        def call(args: list[Any], symbols: dict[str, int]) -> tuple[Any, ...]:
            try:
                results = self._engine.run(args, symbols)
            except (CheckFailed, *ort_errors()) as error:
                # Operators of torch raise eager's error.
                self.failure = first_line(error)
                log.warning("%s failed, and the graph runs instead: %s", self.target, self.failure)
                return portable()(args, symbols)
            args.clear()
            return tuple(_laid_out(*pair, symbols) for pair in zip(results, self._strides, strict=True))

        return call


def _laid_out(result: Any, stride: Sequence[Any] | None, symbols: Mapping[str, int]) -> Any:
    """Return a result with the strides that eager gives it."""
    if stride is None or not isinstance(result, torch.Tensor):
        return result
    expected = [sizes.evaluate(step, symbols) for step in stride]
    if same_layout(result.shape, result.stride(), expected):
        return result
    return torch.empty_strided(result.shape, expected, dtype=result.dtype).copy_(result)
