"""A call of a program through ONNX Runtime: the same guards and the same structure as by any other engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from aotexport_runtime.bundle.read import Bundle
from aotexport_runtime.call.onnx.fast_path import OnnxFastPath
from aotexport_runtime.engines.onnx.guards import MODEL, ModelInputs
from aotexport_runtime.engines.onnx.session import OnnxRuntime, as_complex, open_session, run_session
from aotexport_runtime.errors import CallInvalid, CheckFailed, Place
from aotexport_runtime.guards.arguments import ARGUMENTS
from aotexport_runtime.guards.rule import rows
from aotexport_runtime.guards.signature import Bound, Signature
from aotexport_runtime.guards.subjects import ArgumentFacts
from aotexport_runtime.guards.table import GuardTable
from aotexport_runtime.schema.manifest import OnnxModel
from aotexport_runtime.schema.program import ArgumentInput, Program, StateInput
from aotexport_runtime.schema.trees import Constant
from aotexport_runtime.validate import check_onnx
from aotexport_runtime.values.tensors import NumpyTensor, is_torch_tensor
from aotexport_runtime.values.trees import builder


class OnnxPlan:
    """A program with an ONNX model, ready to be called.

    Attributes:
        program: its record.
        session: the `onnxruntime.InferenceSession`.
    """

    def __init__(
        self, bundle: Bundle, program: Program, model: OnnxModel, options: OnnxRuntime, state: dict[str, Any]
    ) -> None:
        """Open the model; calls read and write changed state tensors in `state`.

        Raises:
            BundleInvalid: its inputs and outputs are not the program's.
            NotSupported: ONNX Runtime cannot run it.
        """
        check_onnx(model, program, where=Place("bundle.json"))
        arguments = [index for index, spec in enumerate(program.inputs) if not isinstance(spec, StateInput)]
        self.program = program
        self._model = model
        self._signature = Signature(program.parameters, constant)
        self._unchecked = len(program.outputs) + len(model.updates)
        self._changes = Changes(program, model, state)
        # Tensors elsewhere are copied for ONNX Runtime, wherever the program was captured.
        captured = [spec.meta.device for spec in program.inputs if isinstance(spec, ArgumentInput)]
        facts = ArgumentFacts(program=program, device_types=("cpu", *captured))
        model_inputs = ModelInputs(program, [arguments[index] for index in self._changes.written])
        first = rows(ARGUMENTS, facts)
        self.guards = GuardTable([first, rows(MODEL, model_inputs, after=first)], len(program.inputs))
        self._arguments = arguments
        self._sizes = [index for index, meta in enumerate(program.outputs) if meta is None]
        self._complex = [
            index for index, meta in enumerate(program.outputs) if meta is not None and meta.dtype.startswith("complex")
        ]
        self._unflatten = builder(program.output_tree, constant)
        self.session = open_session(bundle, model, options)
        self.fast_path = OnnxFastPath(
            program=program,
            model=model,
            signature=self._signature,
            rows=self.guards.rows,
            session=self.session,
            unflatten=self._unflatten,
            fallback=self._check_and_run,
        )
        """Serves the usual calls."""
        self.call = self.fast_path.function()
        """`__call__`, without this detour."""

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the program.

        Raises:
            CallInvalid: the call does not fit; lists every violation.
            CheckFailed: a check on values fails; nothing was changed.
            NotSupported: the call needs gradients, or changes an array that cannot be written to.
        """
        return self.call(args, kwargs)

    def _check_and_run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        call = self.bind(args, kwargs)
        if call.violations:
            raise CallInvalid(self.program.name, call.violations)
        return self.run(call)

    def bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Bound:
        """Return the call, bound to the program."""
        inputs: list[Any] = [None] * len(self.program.inputs)
        violations = self._signature.flatten(args, kwargs, inputs)
        return Bound(inputs, {}, violations, {}) if violations else self._checked(inputs)

    def bind_flat(self, values: Sequence[Any]) -> Bound:
        """Return the call with a tensor, array or integer per argument of the program, bound to it."""
        inputs: list[Any] = [None] * len(self.program.inputs)
        for index, value in zip(self._arguments, values, strict=True):
            inputs[index] = value
        return self._checked(inputs)

    def _checked(self, inputs: list[Any]) -> Bound:
        wrapped: dict[int, NumpyTensor] = {}
        for index, value in enumerate(inputs):
            if isinstance(value, np.ndarray):
                inputs[index] = wrapped.setdefault(id(value), NumpyTensor(value))
        symbols: dict[str, int] = {}
        violations = self.guards.check(inputs, symbols)
        return Bound(inputs, symbols, violations, {})

    def run(self, call: Bound) -> Any:
        """Run the model on a call without violations; return the call's result."""
        return self._unflatten(self.outputs(call))

    def outputs(self, call: Bound) -> list[Any]:
        """Run the model on a call without violations; return the program's outputs.

        Raises:
            CheckFailed: a check on values fails; nothing was changed.
        """
        values = [call.inputs[index] for index in self._arguments]
        arrays = [value.value if isinstance(value, NumpyTensor) else value for value in values]
        names, changed = self._changes.state()
        outputs = run_session(
            self.session,
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
        return outputs[: len(self.program.outputs)]


def constant(leaf: Constant) -> Any:
    """Return the value of a constant leaf; torch is imported only for torch's own types."""
    value = leaf.value
    if value is None or isinstance(value, bool | int | float):
        return value
    from aotexport_runtime.execution.codegen import Environment, constant_value

    return constant_value(value, Environment())


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
