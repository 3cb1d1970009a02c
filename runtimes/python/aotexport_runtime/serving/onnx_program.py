"""The program of a bundle that a server runs by its ONNX model; the counterpart of `ServedProgram` without torch."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import numpy as np

from aotexport_runtime.bundle.read import Bundle
from aotexport_runtime.engines.candidates import ONNX
from aotexport_runtime.engines.onnx.session import OnnxRuntime
from aotexport_runtime.engines.openvino.session import OpenVino
from aotexport_runtime.errors import CallInvalid, NotSupported, first_line
from aotexport_runtime.module.loading import load
from aotexport_runtime.serving.arrays import is_rare
from aotexport_runtime.serving.interface import interface_of
from aotexport_runtime.serving.joining import Values
from aotexport_runtime.serving.recorded_arrays import TOLERANCES, check_answers, error_of, read_call


class OnnxProgram:
    """The program of `forward` that the bundle has an ONNX model of.

    Attributes:
        name: its name.
        variants: names of the program and those of its variants that have models.
        interface: its named inputs and outputs.
    """

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
        self.adapters: tuple[str, ...] = ()
        self.name = own[0]
        self.variants = [each for each in bundle.manifest.with_variants(self.name) if each in models]
        programs = [bundle.program(name) for name in self.variants]
        changing = [
            n for n, program in zip(self.variants, programs, strict=True) if models[n].updates or program.rebinds
        ]
        if changing:
            raise NotSupported(
                f"calls of program `{changing[0]}` change state or arguments, and what one client is answered would "
                "depend on the calls of others"
            )
        self.interface = interface_of(programs)
        for spec in (*self.interface.inputs, *self.interface.outputs):
            if is_rare(spec.dtype) or spec.dtype.startswith("complex"):
                raise NotSupported(f"`{spec.name}` is {spec.dtype}, which arrays are not; use torch")
        self._plans = [
            (module.plan(program.name), [spec.index for spec in interface_of([program]).outputs], strings)
            for program, strings in zip(programs, self.interface.choices, strict=True)
        ]

    def applying(self, adapter: str | None) -> AbstractContextManager[None]:
        """Return a context without a meaning: an ONNX model has no adapters."""
        return nullcontext()

    def run(self, values: Values, choice: int = 0) -> list[Any]:
        """Return an array or number per output of the interface; tensors of torch if there are tensors in `values`.

        Args:
            values: borrowed.
            choice: index of the program whose strings the call has.

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

    def check_recorded_calls(self, bundle: Bundle) -> list[Values]:
        """Run the recorded calls of the program and its variants; return their arguments.

        Raises:
            SelfTestFailed: an answer differs from eager's; the message lists the differences.
        """
        entries = [entry for entry in bundle.manifest.testvectors if entry.program in self.variants]
        return [
            check_answers(bundle, entry, partial(self.run, choice=self.variants.index(entry.program)))
            for entry in entries
        ]

    def recorded_values(self, bundle: Bundle) -> Values | None:
        """Return the arguments of the first recorded call of the program or a variant; None: there is none."""
        entry = next((entry for entry in bundle.manifest.testvectors if entry.program in self.variants), None)
        return entry and read_call(bundle, entry).values

    def agree(self, expected: Sequence[Any], got: Sequence[Any]) -> bool:
        """Return whether outputs are equal within the tolerance of their dtype."""
        return all(
            a.shape == b.shape and error_of(a, b) <= TOLERANCES.get(a.dtype.name, 0.0)
            for a, b in zip(map(np.asarray, expected), map(np.asarray, got), strict=True)
        )

    def rounded(self, array: np.ndarray[Any, Any], dtype: str) -> Any:
        """Return the array: no input is of a dtype that numpy lacks."""
        return array
