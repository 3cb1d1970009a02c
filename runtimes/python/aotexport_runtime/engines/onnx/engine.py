"""The engine of a program's ONNX model, by any runtime of such models, and ONNX Runtime.

It needs no torch, unless callers pass its tensors. Models know neither gradients nor memory.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Protocol

import numpy as np

from aotexport_runtime.bundle.read import Bundle
from aotexport_runtime.engines.candidates import ONNX
from aotexport_runtime.engines.engine import Engine
from aotexport_runtime.errors import BundleInvalid, CheckFailed, NotSupported, Place, first_line
from aotexport_runtime.execution.source import define
from aotexport_runtime.guards.rule import GuardSource, Row, input_name, torch_tensors
from aotexport_runtime.schema.manifest import OnnxModel
from aotexport_runtime.schema.program import ArgumentInput, Program, SizeInput, StateInput
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
        over = self._written_over([*arrays.values()]) if self.session.over else {}
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
        """Return the arrays of state that a call writes over, by name of the output; none if two have one memory."""
        new = zip(self._model.outputs[len(self._program.outputs) :], self._model.updates, strict=False)
        over = {
            name: value for name, key in new if name in self.session.over and _is_own(value := self._state.get(key, 0))
        }
        arrays = [*over.values(), *(value for value in arguments if isinstance(value, np.ndarray))]
        places = {value.__array_interface__["data"][0] for value in arrays}
        return over if len(places) == len(arrays) else {}

    def expression(self, source: GuardSource) -> str | None:
        """Return source that calls the session, if values go in and out of the model as they are."""
        if not self._is_plain():
            inputs = [input_name(i) if i in self._paths else "None" for i in range(len(self._program.inputs))]
            return f"{source.constant(self.run)}([{', '.join(inputs)}], {{}})"
        array = "{}.contiguous().numpy(force=True)" if source.kind.has_autograd else "{}"
        feeds = ", ".join(
            f"{source.constant(name)}: {array.format(input_name(index))}"
            for name, index in zip(self._model.inputs, self._paths, strict=True)
        )
        run = source.ask(self.session.infer, source.constant(list(self._model.outputs)), f"{{{feeds}}}")
        from_array = sys.modules["torch"].from_numpy if source.kind.has_autograd else np.asarray
        return f"[{source.ask(from_array, 'y')} for y in {run}]"

    def direct(self) -> Callable[[Sequence[Any]], list[Any]] | None:
        """Return a function of a call's tensors of torch that calls the session alone; None: values do not go as is."""
        if not self._is_plain():
            return None
        source = GuardSource(kind=torch_tensors())
        lines = [f"{input_name(i)} = inputs[{i}]" for i in self._paths]
        lines.append(f"return {self.expression(source)}")
        return define("model", "inputs", lines, source.scope, f"{self._program.name} model")

    def _is_plain(self) -> bool:
        """Return whether the model changes and checks nothing, and all values are common to numpy and ONNX."""
        model, program = self._model, self._program
        others = model.updates, model.checks, model.state_inputs, program.rebinds
        if any(others) or None in program.outputs or any(isinstance(spec, SizeInput) for spec in program.inputs):
            return False
        metas = [spec.meta for spec in program.inputs if isinstance(spec, ArgumentInput)]
        return all(_is_common(meta.dtype) for meta in (*metas, *filter(None, program.outputs)))


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


@dataclass(frozen=True, kw_only=True)
class Session:
    """An opened ONNX model.

    Attributes:
        handle: the runtime's own object, for its user.
        device: where it runs, in words.
        infer: takes names of all outputs, and a value of `feed` per name of an input; returns an array per output, of
            its own memory, or an `OrtValue` where numpy lacks its type. Several threads may call it.
        over: names of outputs that may be written over the inputs that they replace.
    """

    handle: Any
    device: str
    infer: Callable[[Sequence[str], dict[str, Any]], Sequence[Any]]
    over: Container[str] = ()

    def run(
        self, values: Mapping[str, Any], outputs: Sequence[str], *, with_torch: bool, over: Mapping[str, Any]
    ) -> list[Any]:
        """Run the model on a tensor, array or integer per name of an input, which are borrowed.

        Returns its outputs, contiguous, as tensors of torch if `with_torch`, else as arrays of numpy; those of `over`
        are written to the arrays there.
        """
        feeds = {name: feed(value) for name, value in values.items()}
        results = _infer_over(self.handle, outputs, feeds, over) if over else self.infer(outputs, feeds)
        return [_passed(result, with_torch) for result in results]


class ModelRuntime(Protocol):
    """How the runtime of an engine of this name runs a bundle's ONNX models."""

    engine: ClassVar[str]

    def open(self, bundle: Bundle, model: OnnxModel) -> Session:
        """Open a model; raise `BundleInvalid` of its file, `NotSupported` where the runtime does not run it."""
        ...


WRITTEN_OVER = "aotexport.written_over"
"""Key of a model's metadata whose lines name the outputs that may lie in the memory of the state that they replace."""

_CPU = "CPUExecutionProvider"
_FEW_CORES = 2
_NO_KERNEL = (
    "These providers have no such kernel for the types of the model, bfloat16 and float64 above all. "
    "Choose others, `onnx=OnnxRuntime(providers=[...])`, or load target `portable`"
)


@dataclass(frozen=True, kw_only=True)
class OnnxRuntime:
    """How ONNX Runtime runs a bundle's models.

    Attributes:
        providers: execution providers in order of preference, as `onnxruntime.InferenceSession` takes them.
        threads: threads within an operator; None: as many as torch has; without torch, one per core.
        session_options: an `onnxruntime.SessionOptions` to start from; `threads` is set in it. None: the defaults, but
            that threads sleep while they wait for work beside torch, and after calls on one or two cores, since they
            would take time from others.
    """

    engine: ClassVar[str] = ONNX
    providers: Sequence[Any] = (_CPU,)
    threads: int | None = None
    session_options: Any = None

    def open(self, bundle: Bundle, model: OnnxModel, symbols: Mapping[str, int] | None = None) -> Session:
        """Open a model; see `ModelRuntime`. `symbols`: for sizes by symbol; None: for all."""
        try:
            import onnxruntime  # pyright: ignore[reportMissingTypeStubs]
        except ImportError:
            raise NotSupported("target `onnx` needs ONNX Runtime: `pip install 'aotexport-runtime[onnx]'`") from None
        names = [provider if isinstance(provider, str) else provider[0] for provider in self.providers]
        here: list[str] = onnxruntime.get_available_providers()
        missing = [name for name in names if name not in here]
        if missing:
            raise NotSupported(f"this ONNX Runtime has no `{missing[0]}`; it has {', '.join(here)}")
        file, options = bundle.intact_file(model.file), self._options(onnxruntime, model)
        for each in bundle.program(model.program).dimensions:
            if symbols:
                options.add_free_dimension_override_by_name(each.name, symbols[each.symbol])
        try:
            session = onnxruntime.InferenceSession(str(file), options, providers=list(self.providers))
        except (*ort_errors(), RuntimeError, ValueError) as error:
            reason, version = first_line(error), onnxruntime.__version__
            hint = f". {_NO_KERNEL}" if "NOT_IMPLEMENTED" in reason else ""
            raise NotSupported(f"ONNX Runtime {version} does not load `{model.file}`: {reason}{hint}") from None
        inputs, outputs, optional = session.get_inputs(), session.get_outputs(), session.get_overridable_initializers()
        check_names(model, *([value.name for value in values] for values in (inputs, outputs, optional)))
        is_rare = any(_is_rare(value.type) for value in (*inputs, *outputs, *optional))
        infer = partial(_infer_rare, onnxruntime.OrtValue, session) if is_rare else session.run
        over = "" if is_rare or names != [_CPU] else session.get_modelmeta().custom_metadata_map.get(WRITTEN_OVER, "")
        device = ", ".join(session.get_providers())
        return Session(handle=session, device=device, infer=infer, over=frozenset(over.splitlines()))

    def _options(self, onnxruntime: Any, model: OnnxModel) -> Any:
        options = self.session_options
        if options is None:
            options = onnxruntime.SessionOptions()
            if "torch" in sys.modules:
                options.add_session_config_entry("session.intra_op.allow_spinning", "0")
            elif (os.cpu_count() or 1) <= _FEW_CORES:
                options.add_session_config_entry("session.force_spinning_stop", "1")
            if model.state_inputs:
                # ONNX Runtime would warn that each of these is no constant.
                options.log_severity_level = 3
            if model.updates:
                # An arena would keep room for more than a state.
                options.enable_cpu_mem_arena = options.enable_mem_pattern = False
        threads = threads_of(self.threads)
        if threads is not None and (self.threads is not None or self.session_options is None):
            options.intra_op_num_threads = threads
        return options


def ort_errors() -> tuple[type[Exception], ...]:
    """Return the classes of ONNX Runtime's errors, which have none in common; empty: it is not imported."""
    state = sys.modules.get("onnxruntime.capi.onnxruntime_pybind11_state")
    found = vars(state).values() if state is not None else ()
    return tuple(each for each in found if isinstance(each, type) and issubclass(each, Exception))


def threads_of(asked: int | None) -> int | None:
    """Return the number of threads that were asked for, else torch's; None: torch is not imported."""
    torch = sys.modules.get("torch")
    return torch.get_num_threads() if asked is None and torch is not None else asked


def check_names(model: OnnxModel, inputs: list[str], outputs: list[str], optional: list[str]) -> None:
    """Refuse a model with other inputs, outputs and optional inputs than the manifest has (`BundleInvalid`)."""
    expected = list(model.inputs), list(model.outputs), sorted(model.state_inputs.values())
    if (inputs, outputs, sorted(optional)) != expected:
        raise BundleInvalid(
            "its inputs and outputs are not those that the manifest names",
            where=model.file,
            check="onnx-malformed/names",
        )


_ONNX_TYPES = {"bfloat16": 16, "float8_e4m3fn": 17, "float8_e4m3fnuz": 18, "float8_e5m2": 19, "float8_e5m2fnuz": 20}
"""ONNX numbers of element types that numpy lacks."""


def _is_rare(onnx_type: str) -> bool:
    return "bfloat16" in onnx_type or "float8" in onnx_type


def _infer_rare(ort_value: Any, session: Any, outputs: Sequence[str], feeds: dict[str, Any]) -> list[Any]:
    """Run a session of ONNX Runtime of which numpy lacks a type; see `Session.infer`."""
    values = {
        name: ort_value.ortvalue_from_numpy(value) if isinstance(value, np.ndarray) else value
        for name, value in feeds.items()
    }
    results = session.run_with_ort_values(outputs, values)
    return [result if _is_rare(result.data_type()) else result.numpy() for result in results]


def _infer_over(session: Any, outputs: Sequence[str], feeds: dict[str, Any], over: Mapping[str, Any]) -> list[Any]:
    """Run a session on processors whose outputs `over` are written to the arrays there; see `Session.infer`."""
    from onnxruntime import OrtValue  # pyright: ignore[reportMissingTypeStubs]

    binding = session.io_binding()
    for name, value in feeds.items():
        binding.bind_ortvalue_input(name, OrtValue.ortvalue_from_numpy(value))
    for name in outputs:
        if name in over:
            binding.bind_ortvalue_output(name, OrtValue.ortvalue_from_numpy(over[name]))
        else:
            binding.bind_output(name)
    session.run_with_iobinding(binding)
    results = zip(outputs, binding.get_outputs(), strict=True)
    return [over[name] if name in over else value.numpy() for name, value in results]


def feed(value: Any) -> Any:
    """Return a contiguous array of the value, or where numpy lacks its type, an `OrtValue` of its bytes."""
    if isinstance(value, int):
        return np.asarray(value, np.int64)
    if is_torch_tensor(value):
        import torch

        tensor = value.detach().resolve_conj().resolve_neg().cpu().contiguous()
        name = str(tensor.dtype).removeprefix("torch.")
        if name in _ONNX_TYPES:
            return _rare(tensor.view(torch.uint16 if tensor.element_size() == 2 else torch.uint8).numpy(), name)
        value = tensor.numpy()
    elif not value.dtype.isnative:
        # ONNX Runtime ignores the order of bytes.
        value = value.astype(value.dtype.newbyteorder("="))
    array = np.ascontiguousarray(value).reshape(value.shape)
    if array.dtype.name in _ONNX_TYPES:
        return _rare(array.view(f"u{array.itemsize}"), array.dtype.name)
    if array.dtype.kind == "c":
        return array[..., None].view(f"f{array.itemsize // 2}")
    return array


def _rare(bits: np.ndarray[Any, Any], name: str) -> Any:
    import onnxruntime  # pyright: ignore[reportMissingTypeStubs]

    return onnxruntime.OrtValue.ortvalue_from_numpy_with_onnx_type(bits, _ONNX_TYPES[name])


def _passed(result: Any, with_torch: bool) -> Any:
    """Return a result of `Session.infer` as a tensor of torch or an array of numpy."""
    is_rare = hasattr(result, "data_type")
    if with_torch:
        import torch

        return torch.from_dlpack(result) if is_rare else torch.from_numpy(np.asarray(result))
    if is_rare:
        raise NotSupported(f"numpy has no type for an output that is {result.data_type()}; pass tensors of torch")
    return np.asarray(result)


def as_complex(value: Any) -> Any:
    """Return a tensor or array of pairs, the form of complex numbers in models, as complex numbers."""
    if is_torch_tensor(value):
        import torch

        # `view_as_complex` checks strides, which mean nothing for an empty tensor.
        return torch.view_as_complex(value if value.numel() else torch.zeros(value.shape, dtype=value.dtype))
    return np.ascontiguousarray(value).view(np.result_type(value.dtype, np.complex64))[..., 0]
