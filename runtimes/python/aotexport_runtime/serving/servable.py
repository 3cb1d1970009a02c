"""`Servable`: a bundle that a server calls by the names of its inputs."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
import torch

from aotexport_runtime.bundle.read import open_bundle
from aotexport_runtime.errors import ArgumentInvalid, CallInvalid, NotSupported
from aotexport_runtime.serving.interface import BatchAxes, TensorSpec
from aotexport_runtime.serving.program import ServedProgram, Values, as_array, is_rare
from aotexport_runtime.serving.warm_up import check_recorded_calls, proven_batch
from aotexport_runtime.values import dtypes
from aotexport_runtime.values.arguments import check_type
from aotexport_runtime.values.tensors import is_torch_tensor

log = logging.getLogger("aotexport_runtime")

_KINDS = "biufc"
"""Kinds of arrays that tensors have."""


class Servable:
    """A loaded bundle for inference: named tensors in, named tensors out.

    It runs the program of `forward` in evaluation mode, without gradients. Calls may come from any thread, and run one
    after the other.

    Attributes:
        inputs: one entry per input.
        outputs: one entry per output.
    """

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        engine: str | None = None,
        device: str = "cpu",
        threads: int | None = None,
        trust: Literal["data", "native"] = "data",
    ) -> None:
        """Load the bundle at `path`; nothing has run yet, see `warm_up`.

        Args:
            path: directory of the bundle.
            engine: target of `load`; None: `auto`.
            device: see `load`.
            threads: threads of an operator, of the whole process; None: as torch chooses.
            trust: see `load`.

        Raises:
            ArgumentInvalid: an argument is of a wrong type, or `threads` is below 1.
            BundleInvalid: see `load`.
            NotSupported: see `load`; or the bundle has no program that clients can call.
        """
        check_type("threads", threads, (int, type(None)), "a number of threads")
        if threads is not None and threads < 1:
            raise ArgumentInvalid(f"`threads`: expected at least 1, got {threads}")
        if engine == "onnx":
            raise NotSupported("a Servable runs programs by torch; for ONNX use `load(path, target='onnx')`")
        self._bundle = open_bundle(path)
        self._program: ServedProgram | None = ServedProgram(
            self._bundle, target=engine or "auto", device=device, trust=trust
        )
        self._batch: BatchAxes | None = None
        self.inputs = self._program.interface.inputs
        self.outputs = self._program.interface.outputs
        if threads is not None:
            torch.set_num_threads(threads)

    @property
    def batch_axes(self) -> BatchAxes | None:
        """Where calls may be joined; None: nowhere, or `warm_up` has not shown it."""
        return self._batch

    def warm_up(self) -> None:
        """Run the recorded calls, compare with what eager gave, and find out whether calls can be joined.

        Raises:
            SelfTestFailed: an answer differs; the message lists the differences.
            NotSupported: calls change the module's state, so that an answer could depend on other clients.
        """
        program = self._served()
        recorded = check_recorded_calls(self._bundle, program)
        if not recorded:
            log.warning("%s has no recorded calls of program %s: nothing was checked", self._bundle.root, program.name)
        self._batch = proven_batch(program, recorded)

    def infer(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the outputs of a call, by name.

        Args:
            inputs: an array of numpy, a tensor of torch or a number per input, by name; borrowed. What the model writes
                into an argument changes the caller's. A float32 array for an input of a dtype that numpy lacks
                (bfloat16) is rounded to it.

        Returns:
            Tensors of torch if a tensor of torch was passed; else arrays, with the tensors' memory; as float32 where
            numpy lacks the dtype. A number is an array of no axes.

        Raises:
            CallInvalid: names are missing or unknown, or a value does not fit; lists every violation.
            NotSupported: the servable is closed.
        """
        program = self._served()
        values = self._values(program, inputs)
        return self._named(program.run(values), as_arrays=not any(map(is_torch_tensor, inputs.values())))

    def close(self) -> None:
        """Let go of the module; later calls are refused."""
        self._program = None

    def _served(self) -> ServedProgram:
        if self._program is None:
            raise NotSupported(f"the servable of `{self._bundle.root}` is closed")
        return self._program

    def _values(self, program: ServedProgram, inputs: Mapping[str, Any]) -> Values:
        expected = ", ".join(f"`{spec.name}`" for spec in self.inputs)
        names = {spec.name for spec in self.inputs}
        violations = [f"`{spec.name}`: missing" for spec in self.inputs if spec.name not in inputs]
        violations += [f"`{name}`: no such input; there are {expected}" for name in inputs if name not in names]
        values = [_value(spec, inputs[spec.name], violations) for spec in self.inputs if spec.name in inputs]
        if violations:
            raise CallInvalid(program.name, violations)
        return values

    def _named(self, outputs: list[Any], *, as_arrays: bool) -> dict[str, Any]:
        values = map(as_array, outputs) if as_arrays else outputs
        return {spec.name: value for spec, value in zip(self.outputs, values, strict=True)}


def _value(spec: TensorSpec, value: Any, violations: list[str]) -> Any:
    """Return a value of a call as the program takes it; report one that is none."""
    if not is_torch_tensor(value):
        value = np.asarray(value)
        if value.dtype.kind not in _KINDS:
            violations.append(f"`{spec.name}`: expected an array or a tensor, got an array of {value.dtype}")
            return value
        if not value.dtype.isnative:
            value = value.astype(value.dtype.newbyteorder("="))
    if spec.is_number:
        if math.prod(value.shape) != 1 or "int" not in str(value.dtype):
            violations.append(f"`{spec.name}`: expected an integer, got {value.dtype}{list(value.shape)}")
            return 0
        return int(value.item())
    dtype = dtypes.dtype(spec.dtype)
    if is_rare(dtype) and isinstance(value, np.ndarray) and value.dtype == np.float32:
        return torch.tensor(value, dtype=dtype)
    return value
