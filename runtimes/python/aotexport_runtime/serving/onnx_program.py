"""The program of a bundle that a server runs by its ONNX model, and its recorded calls as arrays of numpy. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import safetensors.numpy
from safetensors import SafetensorError

from aotexport_runtime.bundle.generated import generated_inputs
from aotexport_runtime.bundle.read import Bundle
from aotexport_runtime.commands.results import VectorResult
from aotexport_runtime.engines.candidates import ONNX
from aotexport_runtime.engines.onnx.session import OnnxRuntime, ort_errors
from aotexport_runtime.engines.openvino.session import OpenVino
from aotexport_runtime.errors import BundleInvalid, CallInvalid, NotSupported, Place, first_line
from aotexport_runtime.module.loading import load
from aotexport_runtime.schema.manifest import VectorEntry
from aotexport_runtime.schema.trees import Leaf
from aotexport_runtime.schema.vectors import Vector, VectorInput
from aotexport_runtime.serving.interface import interface_of, is_rare
from aotexport_runtime.serving.joining import AnyProgram, Values, result_of
from aotexport_runtime.validate.vector import check_stored
from aotexport_runtime.values.compare import NORM, NORMS, Observed, kept
from aotexport_runtime.values.trees import leaves

Array = np.ndarray[Any, Any]


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
        named = [entry.name for entry in bundle.manifest.programs if entry.name in models]
        own = [name for name in named if bundle.program(name).method == "forward"]
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
        super().__init__(bundle, variants, engine)
        for spec in (*self.interface.inputs, *self.interface.outputs):
            if is_rare(spec.dtype) or spec.dtype.startswith("complex"):
                raise NotSupported(f"`{spec.name}` is {spec.dtype}, which arrays are not; use torch")
        self._plans = [
            (module.plan(program.name), [spec.index for spec in interface_of([program]).outputs], strings)
            for program, strings in zip(self.programs, self.interface.choices, strict=True)
        ]

    def run(self, values: Values, choice: int = 0) -> list[Any]:
        violations: list[str] = []
        for plan, indices, strings in self._plans:
            if strings != self.interface.choices[choice]:
                continue
            call = plan.bind_flat(values)
            if not call.violations:
                try:
                    outputs = plan.outputs(call)
                except ort_errors() as error:
                    raise ValueError(first_line(error)) from None
                return [outputs[index] for index in indices]
            violations = violations or call.violations
        raise CallInvalid(self.name, violations)

    def values_of(self, entry: VectorEntry) -> Values:
        return read_call(self.bundle, entry)[1]

    def run_recorded(self) -> Iterator[tuple[Values, VectorResult]]:
        for entry in self.recorded_calls:
            vector, values, stored = read_call(self.bundle, entry)
            copies = [value if isinstance(value, int) else value.copy() for value in values]
            outputs = self.run(copies, self.variants.index(entry.program))
            tree = self.bundle.program(entry.program).output_tree
            paths = [path for path, leaf in leaves(tree, "output") if isinstance(leaf, Leaf)]
            expected, got = Observed(), Observed()
            for path, output in zip(paths, outputs, strict=True):
                name = f"call 0: {path}"
                expected.facts[name] = vector.facts.get(name, "nothing").partition(" strides ")[0]
                expected.values |= {key: stored[key] for key in (name, name + NORM, name + NORMS) if key in stored}
                if isinstance(output, int):
                    got.facts[name] = repr(output)
                else:
                    got.facts[name] = f"{output.dtype}{list(output.shape)}"
                    got.values |= _sampled(name, output.reshape(-1), vector.sample)
            yield values, result_of(self.bundle, self.target, self.least, entry, vector, expected, got)


def _sampled(name: str, flat: Array, sample: int | None) -> dict[str, Array]:
    """Return a value as recorded calls keep it; the counterpart of `values.observe.sampled`."""
    elements = kept(flat, sample)
    if len(elements) == len(flat):
        return {name: elements}
    magnitudes = np.abs(flat.astype(np.float64))
    norms = np.array([np.linalg.norm(magnitudes), magnitudes[np.isfinite(magnitudes)].max(initial=0.0)])
    return {name: elements, name + NORM: norms[:1]} if sample is None else {name: elements, name + NORMS: norms}


def read_call(bundle: Bundle, entry: VectorEntry) -> tuple[Vector, Values, dict[str, Array]]:
    """Return a recorded call: its record, an array or integer per argument, and what was observed, by name.

    Raises:
        BundleInvalid: the record is invalid, or does not fit the stored arrays.
        NotSupported: numpy lacks a dtype.
    """
    vector = bundle.vector(entry)
    try:
        arrays = safetensors.numpy.load(bundle.bytes_of(entry.tensors))
    except SafetensorError as error:
        raise BundleInvalid(
            f"not a safetensors file: {error}", where=entry.tensors, check="tensor-stored/safetensors"
        ) from None
    except KeyError as error:
        raise NotSupported(f"recorded call `{entry.name}` has values of {error}, which numpy lacks") from None
    check_stored(vector, {key: array.shape for key, array in arrays.items()}, Place(entry.record))
    for spec, dtype, made in generated_inputs(vector, bundle.program(entry.program)):
        if dtype == "bfloat16":
            raise NotSupported(f"recorded call `{entry.name}` has values of bfloat16, which numpy lacks")
        arrays[spec.key] = made.astype(dtype)
    values: Values = [_spanned(arrays, spec) if spec.value is None else spec.value for spec in vector.inputs]
    return vector, values, {name: arrays[f"v{index}"] for index, name in enumerate(vector.values)}


def _spanned(arrays: Mapping[str, Array], spec: VectorInput) -> Array:
    """Return the argument as an array of its own."""
    base = arrays[spec.key] if spec.key in arrays else np.empty(0, np.float32)
    steps = [step * base.itemsize for step in spec.stride]
    return np.lib.stride_tricks.as_strided(base[spec.offset :], spec.shape, steps, writeable=False).copy()
