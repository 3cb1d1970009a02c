"""Changes of a call through ONNX Runtime: a model returns new values, which are written where the program would."""

from __future__ import annotations

from typing import Any

from aotexport_runtime.engines.onnx.session import as_complex
from aotexport_runtime.errors import BundleInvalid
from aotexport_runtime.schema.manifest import OnnxModel
from aotexport_runtime.schema.program import Program, StateInput
from aotexport_runtime.values.tensors import is_torch_tensor


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
        names = {spec.name for spec in program.inputs if isinstance(spec, StateInput)}
        self._updates = [(name, paths.index(name) if name in paths else None) for name in model.updates]
        for name, index in self._updates:
            if (index is None) == (name not in names):
                raise BundleInvalid(
                    f"the model changes {name[:80]!r}, which is no one input", where=model.file, code="onnx-malformed"
                )
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
