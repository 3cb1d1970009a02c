"""The engines of ONNX models: that of a program, by a runtime of such models.

They need no torch, unless callers pass its tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from aotexport_runtime.bundle.read import Bundle
from aotexport_runtime.engines.onnx.guards import MODEL, ModelInputs
from aotexport_runtime.engines.onnx.session import ModelRuntime, as_complex
from aotexport_runtime.errors import CheckFailed, Place
from aotexport_runtime.guards.rule import GuardSource, Row, input_name, rows
from aotexport_runtime.schema.manifest import OnnxModel
from aotexport_runtime.schema.program import ArgumentInput, Program, SizeInput, StateInput
from aotexport_runtime.validate import check_onnx
from aotexport_runtime.values.tensors import NumpyTensor, is_torch_tensor


class OnnxEngine:
    """The ONNX model of a program; see `Engine`.

    Attributes:
        session: the opened model.
    """

    def __init__(
        self, bundle: Bundle, program: Program, model: OnnxModel, options: ModelRuntime, state: dict[str, Any]
    ) -> None:
        """Open the model; calls read and write changed state tensors in `state`.

        Raises:
            BundleInvalid: its inputs and outputs are not the program's.
            NotSupported: the runtime is missing, or cannot run it.
        """
        self.name = options.engine
        check_onnx(model, program, where=Place("bundle.json"))
        self._arguments = [i for i, spec in enumerate(program.inputs) if not isinstance(spec, StateInput)]
        self._program = program
        self._model = model
        self._unchecked = len(program.outputs) + len(model.updates)
        self._changes = Changes(program, model, state)
        written = [self._arguments[index] for index in self._changes.written]
        self.rows: Sequence[Row] = rows(MODEL, ModelInputs(program, written))
        self._sizes = [index for index, meta in enumerate(program.outputs) if meta is None]
        self._complex = [
            index for index, meta in enumerate(program.outputs) if meta is not None and meta.dtype.startswith("complex")
        ]
        self.session = options.open(bundle, model)

    def why_not(self, inputs: list[Any], symbols: dict[str, int]) -> str | None:
        """Return None: it serves every call that meets the guards of the model, which are the program's."""
        return None

    def run(self, inputs: list[Any], symbols: dict[str, int], because: str = "") -> list[Any]:
        """Run the model; see `Engine`.

        Raises:
            CheckFailed: a check on values fails; nothing was changed.
        """
        values = [inputs[index] for index in self._arguments]
        arrays = [value.value if isinstance(value, NumpyTensor) else value for value in values]
        names, changed = self._changes.state()
        outputs = self.session.run(
            [*self._model.inputs, *names],
            [*arrays, *changed],
            self._model.outputs,
            with_torch=any(map(is_torch_tensor, arrays)),
        )
        outputs, passed = outputs[: self._unchecked], outputs[self._unchecked :]
        for message, holds in zip(self._model.checks, passed, strict=True):
            if not holds:
                raise CheckFailed(message)
        self._changes.apply(arrays, outputs)
        for index in self._sizes:
            outputs[index] = int(outputs[index])
        for index in self._complex:
            outputs[index] = as_complex(outputs[index])
        return outputs[: len(self._program.outputs)]

    def expression(self, source: GuardSource) -> str | None:
        """Return source that calls the session, if values go in and out of the model as they are."""
        if not self._is_plain():
            inputs = [input_name(i) if i in self._arguments else "None" for i in range(len(self._program.inputs))]
            return f"{source.constant(self.run)}([{', '.join(inputs)}], {{}})"
        array = "{}.numpy()" if source.kind.has_autograd else "{}"
        feeds = ", ".join(
            f"{source.constant(name)}: {array.format(input_name(index))}"
            for name, index in zip(self._model.inputs, self._arguments, strict=True)
        )
        run, outputs = source.constant(self.session.infer), source.constant(list(self._model.outputs))
        convert = source.constant(_from_numpy() if source.kind.has_autograd else np.asarray)
        return f"[{convert}(y) for y in {run}({outputs}, {{{feeds}}})]"

    def _is_plain(self) -> bool:
        """Return whether the model changes and checks nothing, and all values are common to numpy and ONNX."""
        model, program = self._model, self._program
        if model.updates or model.checks or model.state_inputs or program.rebinds or None in program.outputs:
            return False
        if any(isinstance(spec, SizeInput) for spec in program.inputs):
            return False
        metas = [spec.meta for spec in program.inputs if isinstance(spec, ArgumentInput)]
        return all(_is_common(meta.dtype) for meta in (*metas, *filter(None, program.outputs)))


def _is_common(dtype: str) -> bool:
    """Return whether both numpy and ONNX have a dtype."""
    return dtype == "bool" or dtype.startswith(("int", "uint")) or dtype in ("float16", "float32", "float64")


def _from_numpy() -> Callable[[Any], Any]:
    import torch

    return torch.from_numpy


class Changes:
    """The changes of one program: state for the calls to come, and arguments of its caller."""

    def __init__(self, program: Program, model: OnnxModel, state: dict[str, Any]) -> None:
        """Prepare the changes that `model` returns.

        Args:
            program: its program.
            model: its entry in the manifest.
            state: values of changed state tensors by name; shared by the programs of a bundle, written to by calls.

        Raises:
            BundleInvalid: a changed name is no argument and no state of the program, or both.
        """
        self._state = state
        self._inputs = model.state_inputs
        self._rebinds = [(rebind.output_index, rebind.name) for rebind in program.rebinds]
        paths = [spec.path for spec in program.inputs if not isinstance(spec, StateInput)]
        self._updates = [(name, paths.index(name) if name in paths else None) for name in model.updates]
        self.written = [index for _, index in self._updates if index is not None]

    def state(self) -> tuple[list[str], list[Any]]:
        """Return the names of the model's inputs for changed state tensors, and their values."""
        changed = {name: self._state[key] for key, name in self._inputs.items() if key in self._state}
        return list(changed), list(changed.values())

    def apply(self, arguments: list[Any], outputs: list[Any]) -> None:
        """Write the changes of a call.

        Args:
            arguments: arguments of the call; written to.
            outputs: results of the model: the program's outputs, then its updates.
        """
        for index, name in self._rebinds:
            self._state[name] = outputs[index]
        for (name, index), value in zip(self._updates, outputs[len(outputs) - len(self._updates) :], strict=True):
            if index is None:
                self._state[name] = value
            else:
                _write(arguments[index], value)


def _write(argument: Any, value: Any) -> None:
    if not is_torch_tensor(argument):
        argument[...] = as_complex(value) if argument.dtype.kind == "c" else value
        return
    import torch

    with torch.no_grad():
        argument.copy_(as_complex(value) if argument.is_complex() else value)
