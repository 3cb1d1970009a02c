"""The program of a bundle that a server calls: flat values in, flat tensors out, several calls as one."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import torch

from aotexport_runtime.bundle.read import Bundle
from aotexport_runtime.call.flat_call import arguments_of, flat_outputs
from aotexport_runtime.module.compose import program_of
from aotexport_runtime.module.loading import load
from aotexport_runtime.module.module_class import methods_of
from aotexport_runtime.serving.interface import BatchAxes, interface_of
from aotexport_runtime.values.tensors import is_torch_tensor

Values = list[Any]
"""A tensor, array or integer per input of an `Interface`."""


class ServedProgram:
    """The program of `forward` for evaluation without gradients, loaded; its calls wait for one another.

    Attributes:
        name: its name.
        target: engine that was asked for.
        module: the loaded bundle.
        interface: its named inputs and outputs.
        variants: names of the program and its variants.
    """

    def __init__(
        self, bundle: Bundle, *, target: str, device: str, trust: Literal["data", "native"], mapped: bool | None
    ) -> None:
        """Load the bundle; arguments as of `load`.

        Raises:
            NotSupported: see `load`; or the bundle has no program for evaluation, or clients cannot call it.
        """
        with torch.no_grad():
            self.name = program_of("forward", methods_of(bundle), training=False)
        self.variants = [self.name, *(e.name for e in bundle.manifest.programs if e.variant_of == self.name)]
        programs = [bundle.program(name) for name in self.variants]
        self.interface = interface_of(programs)
        self.target = target
        self.module = load(bundle, target=target, device=device, trust=trust, mapped=mapped).eval()
        self._program = programs[0]
        self._function = self.module.program(self.name)
        self._arguments = arguments_of(programs[0])
        self._device = torch.device(device)
        # The model's own gradients are not recorded in inference mode.
        inference = all("inference_mode" not in program.fixed for program in programs)
        self._without_gradients: Any = torch.inference_mode if inference else torch.no_grad
        self._lock = threading.Lock()

    def run(self, values: Values) -> list[Any]:
        """Return a tensor or number per output of the interface.

        Args:
            values: borrowed; a tensor that the model writes to is changed, as in eager execution.

        Raises:
            CallInvalid: the call does not fit the program.
        """
        tensors = [value if isinstance(value, int) else self._tensor(value) for value in values]
        with self._lock, self._without_gradients():
            args, kwargs = self._arguments(tensors, self.module.state_tensors())
            result = self._function(*args, **kwargs)
            return [value for _, value in flat_outputs(self._program.output_tree, result)]

    def run_joined(self, calls: Sequence[Values], axes: BatchAxes) -> list[list[Any]]:
        """Return the outputs of each of several calls, run as one.

        Args:
            calls: alike in all but the size of the batch.
            axes: where they are joined.

        Raises:
            CallInvalid: the joined call does not fit the program.
        """
        joined = [
            _concatenated(values, axis) for values, axis in zip(zip(*calls, strict=True), axes.inputs, strict=True)
        ]
        ends = list(itertools.accumulate(values[0].shape[axes.inputs[0]] for values in calls))
        outputs = self.run(joined)
        return [
            [output.narrow(axis, begin, end - begin) for output, axis in zip(outputs, axes.outputs, strict=True)]
            for begin, end in itertools.pairwise([0, *ends])
        ]

    def run_together(self, calls: Sequence[Values], axes: BatchAxes | None) -> list[list[Any]]:
        """Return the outputs of each of several calls: run as one, or of the only one; see `run`, `run_joined`."""
        if axes is None or len(calls) == 1:
            return [self.run(values) for values in calls]
        return self.run_joined(calls, axes)

    def _tensor(self, value: Any) -> torch.Tensor:
        if not is_torch_tensor(value):
            # A tensor cannot keep a caller from writing, nor have steps backwards.
            fits = value.flags.writeable and all(step >= 0 for step in value.strides)
            value = torch.from_numpy(value if fits else value.copy())
        return value.to(self._device)


def _concatenated(values: Sequence[Any], axis: int) -> Any:
    if is_torch_tensor(values[0]):
        return torch.cat(list(values), dim=axis)
    return np.concatenate(values, axis=axis)


def as_array(value: Any) -> np.ndarray[Any, Any]:
    """Return an output as an array, with the tensor's memory if it can; bfloat16 and float8 as float32."""
    if not is_torch_tensor(value):
        return np.asarray(value, np.int64)
    tensor = value.detach().cpu().resolve_conj().resolve_neg()
    return (tensor.float() if is_rare(tensor.dtype) else tensor).numpy()


def is_rare(dtype: torch.dtype) -> bool:
    """Return whether numpy lacks a dtype, all of whose values float32 has: bfloat16 and float8."""
    return dtype.is_floating_point and dtype not in (torch.float16, torch.float32, torch.float64)
