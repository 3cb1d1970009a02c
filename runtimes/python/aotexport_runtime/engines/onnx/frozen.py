"""The ONNX model of an inference graph, as native code of it. It holds a copy of the weights."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

from aotexport_runtime.bundle.read import Bundle
from aotexport_runtime.engines.frozen import Frozen, Weights
from aotexport_runtime.engines.onnx.engine import OnnxEngine
from aotexport_runtime.engines.onnx.session import ModelRuntime, ort_errors
from aotexport_runtime.errors import CheckFailed, NotSupported, first_line
from aotexport_runtime.execution.codegen import Function
from aotexport_runtime.rewrite.partition import Subgraph
from aotexport_runtime.schema.program import ArgumentInput, Program

log = logging.getLogger("aotexport_runtime")


class FrozenModel(Frozen):
    """Runs the ONNX model of an inference graph."""

    def __init__(self, bundle: Bundle, program: Program, runtime: ModelRuntime, weights: Weights) -> None:
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

    def forward_of(self, subgraph: Subgraph, fallback: Callable[[], Function]) -> Function:
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
            return self.laid_out(results, symbols)

        return call
