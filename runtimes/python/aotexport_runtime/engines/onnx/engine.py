"""The engine of a program's ONNX model, by any runtime of such models.

It needs no torch, unless callers pass its tensors. Models know neither gradients nor memory.
"""

from __future__ import annotations

import functools
import itertools
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from aotexport_runtime.bundle.read import Bundle
from aotexport_runtime.engines.engine import Engine
from aotexport_runtime.engines.onnx.session import ModelRuntime, as_complex
from aotexport_runtime.errors import CheckFailed, NotSupported, Place
from aotexport_runtime.execution.source import define
from aotexport_runtime.guards.rule import GuardSource, Row, input_name, torch_tensors
from aotexport_runtime.schema.manifest import OnnxModel
from aotexport_runtime.schema.program import ArgumentInput, Program, SizeInput, StateInput
from aotexport_runtime.schema.values import TensorMeta
from aotexport_runtime.validate.manifest import check_onnx
from aotexport_runtime.values.tensors import NumpyTensor, is_torch_tensor


class OnnxEngine(Engine):
    """The ONNX model of a program, opened as `session`; see `Engine`."""

    def __init__(
        self, bundle: Bundle, program: Program, model: OnnxModel, options: ModelRuntime, state: dict[str, Any]
    ) -> None:
        """Open the model.

        Calls read changed state tensors from `state`, and write them there; the programs of a bundle share it. Where
        `program` reads an argument of the bundle's as state, it is there by its path.

        Raises:
            BundleInvalid: its inputs and outputs are not the program's.
            NotSupported: the runtime is missing, or cannot run it.
        """
        self.name = options.engine
        whole = bundle.program(model.program)
        check_onnx(model, whole, where=Place("bundle.json"))
        self._program, self._model, self._state = program, model, state
        paths = {i: spec.path for i, spec in enumerate(whole.inputs) if not isinstance(spec, StateInput)}
        self._names = dict(zip(paths, model.inputs, strict=True))
        self._paths = {i: path for i, path in paths.items() if not isinstance(program.inputs[i], StateInput)}
        self._read = model.state_inputs | {paths[i]: self._names[i] for i in paths.keys() - self._paths.keys()}
        self._written = {path: i for i, path in self._paths.items() if path in model.updates}
        written = {i: path for path, i in self._written.items()}
        self.rows = model_rows(program, self._paths, written)
        self.session = options.open(bundle, model)

    def run(self, inputs: list[Any], symbols: dict[str, int], because: str = "") -> list[Any]:
        """Run the model; see `Engine`.

        Raises:
            CheckFailed: a check on values fails; nothing was changed.
        """
        model, program = self._model, self._program
        arrays = {i: value.value if isinstance(value := inputs[i], NumpyTensor) else value for i in self._paths}
        values = {self._names[i]: array for i, array in arrays.items()}
        values |= {name: self._state[key] for key, name in self._read.items() if key in self._state}
        with_torch = any(map(is_torch_tensor, arrays.values()))
        over = self._written_over([*arrays.values()]) if self.session.over and not model.checks else {}
        results = iter(self.session.run(values, model.outputs, with_torch=with_torch, over=over))
        outputs = [next(results) for _ in program.outputs]
        updates = {name: next(results) for name in model.updates}
        for message, holds in zip(model.checks, results, strict=True):
            if not holds:
                raise CheckFailed(message)
        self._state |= {rebind.name: outputs[rebind.output_index] for rebind in program.rebinds}
        for name, value in updates.items():
            if name in self._written:
                _write(arrays[self._written[name]], value)
            else:
                self._state[name] = value
        for index, meta in enumerate(program.outputs):
            if meta is None:
                outputs[index] = int(outputs[index])
            elif meta.dtype.startswith("complex"):
                outputs[index] = as_complex(outputs[index])
        return outputs

    def _written_over(self, arguments: list[Any]) -> dict[str, Any]:
        """Return the arrays of state that a call writes over, by name of the output; none if two share memory."""
        new = zip(self._model.outputs[len(self._program.outputs) :], self._model.updates, strict=False)
        over = {
            name: value for name, key in new if name in self.session.over and _is_own(value := self._state.get(key, 0))
        }
        arrays = [*over.values(), *(value for value in arguments if isinstance(value, np.ndarray))]
        places = sorted((place := value.__array_interface__["data"][0], place + value.nbytes) for value in arrays)
        return over if all(end <= begin for (_, end), (begin, _) in itertools.pairwise(places)) else {}

    def expression(self, source: GuardSource, *, is_laid_out: bool = False) -> str | None:
        """Return source that calls the session, if values go in and out of the model as they are.

        `is_laid_out`: tensors are those of processors, laid out as in the program, and no negated views.
        """
        if not self._is_plain():
            inputs = [input_name(i) if i in self._paths else "None" for i in range(len(self._program.inputs))]
            return f"{source.constant(self.run)}([{', '.join(inputs)}], {{}})"
        array = functools.partial(self._array, is_laid_out) if source.kind.has_autograd else input_name
        feeds = ", ".join(
            f"{source.constant(name)}: {array(index)}"
            for name, index in zip(self._model.inputs, self._paths, strict=True)
        )
        run = source.ask(self.session.infer, source.constant(list(self._model.outputs)), f"{{{feeds}}}")
        from_array = sys.modules["torch"].from_numpy if source.kind.has_autograd else np.asarray
        return f"[{source.ask(from_array, 'y')} for y in {run}]"

    def _array(self, is_laid_out: bool, index: int) -> str:
        value, spec = input_name(index), self._program.inputs[index]
        if is_laid_out and isinstance(spec, ArgumentInput) and is_contiguous(spec.meta):
            # `force` runs four operators for nothing, which a small model feels.
            return f"({value}.detach() if {value}.requires_grad else {value}).numpy()"
        return f"{value}.contiguous().numpy(force=True)"

    def direct(self) -> Callable[[Sequence[Any]], list[Any]] | None:
        """Return a function of a call's tensors of torch that calls the session alone; None: values do not go as is."""
        if not self._is_plain():
            return None
        source = GuardSource(kind=torch_tensors())
        lines = [f"{input_name(i)} = inputs[{i}]" for i in self._paths]
        lines.append(f"return {self.expression(source, is_laid_out=True)}")
        return define("model", "inputs", lines, source.scope, f"{self._program.name} model")

    def _is_plain(self) -> bool:
        """Return whether the model changes and checks nothing, and all values are common to numpy and ONNX."""
        model, program = self._model, self._program
        others = model.updates, model.checks, model.state_inputs, program.rebinds
        if any(others) or None in program.outputs or any(isinstance(spec, SizeInput) for spec in program.inputs):
            return False
        metas = [spec.meta for spec in program.inputs if isinstance(spec, ArgumentInput)]
        return all(_is_common(meta.dtype) for meta in (*metas, *filter(None, program.outputs)))


def is_contiguous(meta: TensorMeta | None) -> bool:
    """Return whether a tensor is contiguous whatever its first size is, and its others are known."""
    if meta is None:
        return False
    known = [size for size in meta.shape[1:] if isinstance(size, int)]
    strides = [math.prod(known[axis:]) for axis in range(len(meta.shape))]
    return len(known) == len(meta.shape[1:]) and [*meta.stride] == strides


def _is_common(dtype: str) -> bool:
    """Return whether both numpy and ONNX have a dtype."""
    return dtype == "bool" or dtype.startswith(("int", "uint")) or dtype in ("float16", "float32", "float64")


def _is_own(value: Any) -> bool:
    """Return whether a model may write to an array of its state as it is."""
    is_array = isinstance(value, np.ndarray) and value.flags.writeable and value.flags.c_contiguous
    return is_array and value.dtype.isnative and _is_common(value.dtype.name)


def _write(argument: Any, value: Any) -> None:
    if not is_torch_tensor(argument):
        argument[...] = as_complex(value) if argument.dtype.kind == "c" else value
        return
    import torch

    with torch.no_grad():
        argument.copy_(as_complex(value) if argument.is_complex() else value)


# --- guards -------------------------------------------------------------------------------------------------


def model_rows(program: Program, paths: Mapping[int, str], written: Mapping[int, str]) -> list[Row]:
    """Return the guards of the ONNX model of a program: `paths` of arguments, of `written` ones too, by input."""
    tensors = [input_name(index) for index, spec in enumerate(program.inputs) if isinstance(spec, ArgumentInput)]

    def requires_nothing(source: GuardSource) -> str:
        if not source.kind.has_autograd:
            return "True"
        return " and ".join(f"not {value}.requires_grad" for value in tensors) or "True"

    gradients = Row(
        "tensor",
        lambda source: f"not {source.ask(_require_grad, *tensors)}",
        f"an input of program `{program.name}` requires grad, and ONNX models record no gradients. Call it under "
        "`torch.no_grad()`, or load target `portable`",
        quick=requires_nothing,
        stricter=True,
        error=NotSupported,
    )
    return [
        gradients,
        *map(_as_models_read_it, tensors),
        *(_writable(*each) for each in written.items()),
        *(_apart(*each, *other) for each in written.items() for other in paths.items() if each != other),
    ]


def _require_grad(*values: Any) -> bool:
    torch = sys.modules.get("torch")
    if torch is None or not torch.is_grad_enabled():
        return False
    return any(is_torch_tensor(value) and value.requires_grad for value in values)


def _as_models_read_it(value: str) -> Row:
    def holds(source: GuardSource) -> str:
        if source.kind.has_autograd:
            return f"{value}.is_contiguous() and not {value}.is_neg()"
        return f"{value}.flags.c_contiguous"

    return Row("tensor", holds, None)


def _writable(index: int, path: str) -> Row:
    def is_writable(value: Any) -> bool:
        return not isinstance(value, NumpyTensor) or value.value.flags.writeable

    words = f"the program changes `{path}`, which is a read-only array"
    return Row("tensor", lambda source: source.ask(is_writable, input_name(index)), words, "", error=NotSupported)


def _apart(index: int, path: str, other: int, other_path: str) -> Row:
    return Row(
        "memory",
        lambda source: f"not {source.ask(_share, input_name(index), input_name(other))}",
        f"the program changes `{path}`, which shares memory with `{other_path}`, and the model does not know. Pass a "
        "copy, or load target `portable`",
        quick="",
        error=NotSupported,
    )


def _share(a: Any, b: Any) -> bool:
    if is_torch_tensor(a) and is_torch_tensor(b):
        return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()
    return isinstance(a, NumpyTensor) and isinstance(b, NumpyTensor) and np.may_share_memory(a.value, b.value)


# --- models by a runtime ------------------------------------------------------------------------------------
