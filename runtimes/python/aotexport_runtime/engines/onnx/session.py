"""Sessions of ONNX Runtime over the models of a bundle, and what a runtime of such models is."""

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
from aotexport_runtime.errors import BundleInvalid, NotSupported, first_line
from aotexport_runtime.schema.manifest import OnnxModel
from aotexport_runtime.values.tensors import is_torch_tensor


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
            import onnxruntime
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
        infer = partial(_infer_rare, onnxruntime.OrtValue, session) if is_rare else _run_of(session, names)
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


def _run_of(session: Any, providers: Sequence[str]) -> Callable[[Sequence[str], dict[str, Any]], Sequence[Any]]:
    """Return what `run` of a session calls when it has compared names, which takes a tenth of a small model's time."""
    inner = getattr(session, "_sess", None) if providers == [_CPU] else None
    return session.run if inner is None else lambda outputs, feeds: inner.run(outputs, feeds, None)


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
    from onnxruntime import OrtValue

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
    import onnxruntime

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
