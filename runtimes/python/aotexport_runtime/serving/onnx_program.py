"""The program of a bundle that a server runs by its ONNX model; the counterpart of `ServedProgram` without torch."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from aotexport_runtime.bundle.read import Bundle
from aotexport_runtime.engines.candidates import ONNX
from aotexport_runtime.engines.onnx.session import OnnxRuntime
from aotexport_runtime.engines.openvino.session import OpenVino
from aotexport_runtime.errors import CallInvalid, NotSupported, first_line
from aotexport_runtime.module.loading import load
from aotexport_runtime.schema.manifest import VectorEntry
from aotexport_runtime.serving.interface import interface_of, is_rare
from aotexport_runtime.serving.joining import AnyProgram, Values
from aotexport_runtime.serving.recorded_arrays import TOLERANCES, check_answers, error_of, read_call


class OnnxProgram(AnyProgram):
    """A program that the bundle has an ONNX model of."""

    def __init__(self, bundle: Bundle, engine: str, *, threads: int | None) -> None:
        """Open the models.

        Raises:
            NotSupported: the bundle has none of `forward`, calls change something, or numpy lacks a dtype.
        """
        if engine == ONNX:
            module = load(bundle, target="onnx", onnx=OnnxRuntime(threads=threads))
        else:
            module = load(bundle, target="openvino", openvino=OpenVino(threads=threads))
        models = {model.program: model for model in bundle.manifest.onnx}
        entries = [entry for entry in bundle.manifest.programs if entry.name in models]
        own = [e.name for e in entries if e.variant_of is None and bundle.program(e.name).method == "forward"]
        if not own:
            raise NotSupported("the bundle has no ONNX model of `forward`; add it with `aotexport onnx`")
        variants = [each for each in bundle.manifest.with_variants(own[0]) if each in models]
        programs = [bundle.program(name) for name in variants]
        changing = [program.name for program in programs if models[program.name].updates or program.rebinds]
        if changing:
            raise NotSupported(
                f"calls of program `{changing[0]}` change state or arguments, and what one client is answered would "
                "depend on the calls of others"
            )
        super().__init__(bundle, variants)
        for spec in (*self.interface.inputs, *self.interface.outputs):
            if is_rare(spec.dtype) or spec.dtype.startswith("complex"):
                raise NotSupported(f"`{spec.name}` is {spec.dtype}, which arrays are not; use torch")
        self._plans = [
            (module.plan(program.name), [spec.index for spec in interface_of([program]).outputs], strings)
            for program, strings in zip(programs, self.interface.choices, strict=True)
        ]

    def run(self, values: Values, choice: int = 0) -> list[Any]:
        """Return an array or number per output of the interface; tensors of torch if there are tensors in `values`.

        Raises:
            CallInvalid: the call fits no variant of the program.
            ValueError: ONNX Runtime refuses a value, such as an index out of range.
        """
        violations: list[str] = []
        for plan, indices, strings in self._plans:
            if strings != self.interface.choices[choice]:
                continue
            call = plan.bind_flat(values)
            if not call.violations:
                try:
                    outputs = plan.outputs(call)
                except Exception as error:
                    # Errors of ONNX Runtime have no class in common; others are not the caller's.
                    if not type(error).__module__.startswith("onnxruntime."):
                        raise
                    raise ValueError(first_line(error)) from None
                return [outputs[index] for index in indices]
            violations = violations or call.violations
        raise CallInvalid(self.name, violations)

    def values_of(self, entry: VectorEntry) -> Values:
        return read_call(self.bundle, entry).values

    def check_recorded_calls(self) -> list[Values]:
        return [
            check_answers(self.bundle, entry, partial(self.run, choice=self.variants.index(entry.program)))
            for entry in self.recorded_calls
        ]

    def agree(self, expected: Sequence[Any], got: Sequence[Any]) -> bool:
        return all(
            a.shape == b.shape and error_of(a, b) <= TOLERANCES.get(a.dtype.name, 0.0)
            for a, b in zip(map(np.asarray, expected), map(np.asarray, got), strict=True)
        )
