"""An opened ONNX model of a bundle, by any runtime; the one of ONNX Runtime; and conversion of its values."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
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
        infer: takes names of all outputs, and an array per name of an input; returns an array per output, of its own
            memory. Several threads may call it.
        run: see `run_session`, without its first argument.
    """

    handle: Any
    device: str
    infer: Callable[[Sequence[str], dict[str, Any]], Sequence[Any]]
    run: Callable[..., list[Any]]


class ModelRuntime(Protocol):
    """How the runtime of an engine of this name runs a bundle's ONNX models."""

    engine: ClassVar[str]

    def open(self, bundle: Bundle, model: OnnxModel) -> Session:
        """Open a model; raise as `open_session` does."""
        ...


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
    providers: Sequence[Any] = ("CPUExecutionProvider",)
    threads: int | None = None
    session_options: Any = None

    def open(self, bundle: Bundle, model: OnnxModel) -> Session:
        """Open a model; see `ModelRuntime`."""
        session = open_session(bundle, model, self)
        device = ", ".join(session.get_providers())
        return Session(handle=session, device=device, infer=session.run, run=partial(run_session, session))


def threads_of(asked: int | None) -> int | None:
    """Return the number of threads that were asked for, else torch's; None: torch is not imported."""
    torch = sys.modules.get("torch")
    return torch.get_num_threads() if asked is None and torch is not None else asked


_FEW_CORES = 2
_NO_KERNEL = (
    "These providers have no such kernel for the types of the model, bfloat16 and float64 above all. "
    "Choose others, `onnx=OnnxRuntime(providers=[...])`, or load target `portable`"
)


def open_session(bundle: Bundle, model: OnnxModel, options: OnnxRuntime) -> Any:
    """Return an `onnxruntime.InferenceSession` of `model`.

    Raises:
        BundleInvalid: the file is damaged, or its inputs and outputs are not those in the manifest.
        NotSupported: ONNX Runtime is missing, or lacks a provider or an operator of the model.
    """
    try:
        import onnxruntime  # pyright: ignore[reportMissingTypeStubs]
    except ImportError:
        raise NotSupported("target `onnx` needs ONNX Runtime: `pip install 'aotexport-runtime[onnx]'`") from None
    names = [provider if isinstance(provider, str) else provider[0] for provider in options.providers]
    here: list[str] = onnxruntime.get_available_providers()
    missing = [name for name in names if name not in here]
    if missing:
        raise NotSupported(f"this ONNX Runtime has no `{missing[0]}`; it has {', '.join(here)}")
    file = bundle.intact_file(model.file)
    session_options = options.session_options
    if session_options is None:
        session_options = onnxruntime.SessionOptions()
        if "torch" in sys.modules:
            session_options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        elif (os.cpu_count() or 1) <= _FEW_CORES:
            session_options.add_session_config_entry("session.force_spinning_stop", "1")
        if model.state_inputs:
            # ONNX Runtime would warn that each of these is no constant.
            session_options.log_severity_level = 3
    threads = threads_of(options.threads)
    if threads is not None and (options.threads is not None or options.session_options is None):
        session_options.intra_op_num_threads = threads
    try:
        session = onnxruntime.InferenceSession(str(file), session_options, providers=list(options.providers))
    except Exception as error:  # noqa: BLE001 - its errors have no class in common
        reason = first_line(error)
        hint = f". {_NO_KERNEL}" if "NOT_IMPLEMENTED" in reason else ""
        raise NotSupported(
            f"ONNX Runtime {onnxruntime.__version__} does not load `{model.file}`: {reason}{hint}"
        ) from None
    inputs, outputs = [value.name for value in session.get_inputs()], [value.name for value in session.get_outputs()]
    check_names(model, inputs, outputs, [value.name for value in session.get_overridable_initializers()])
    return session


def check_names(model: OnnxModel, inputs: list[str], outputs: list[str], optional: list[str]) -> None:
    """Refuse a model with other inputs, outputs and optional inputs than the manifest has.

    Raises:
        BundleInvalid: it has.
    """
    if (inputs, outputs) != (list(model.inputs), list(model.outputs)) or sorted(optional) != sorted(
        model.state_inputs.values()
    ):
        raise BundleInvalid(
            "its inputs and outputs are not those that the manifest names",
            where=model.file,
            check="onnx-malformed/names",
        )


_ONNX_TYPES = {"bfloat16": 16, "float8_e4m3fn": 17, "float8_e4m3fnuz": 18, "float8_e5m2": 19, "float8_e5m2fnuz": 20}
"""ONNX numbers of element types that numpy lacks."""


def run_session(
    session: Any, names: Sequence[str], values: Sequence[Any], outputs: Sequence[str], *, with_torch: bool
) -> list[Any]:
    """Run a session.

    Args:
        session: an open one.
        names: names of inputs.
        values: a tensor, array or integer per name; borrowed.
        outputs: names of the outputs to return.
        with_torch: return tensors of torch, not arrays of numpy.

    Returns:
        The outputs, on the CPU, contiguous.
    """
    feeds = {name: feed(value) for name, value in zip(names, values, strict=True)}
    if all(isinstance(value, np.ndarray) for value in feeds.values()) and not _has_rare_outputs(session):
        return as_passed(session.run(outputs, feeds), with_torch=with_torch)
    ort = _onnxruntime()
    wrapped = {
        name: ort.OrtValue.ortvalue_from_numpy(value) if isinstance(value, np.ndarray) else value
        for name, value in feeds.items()
    }
    return [_from_ort(value, with_torch) for value in session.run_with_ort_values(outputs, wrapped)]


def _onnxruntime() -> Any:
    import onnxruntime  # pyright: ignore[reportMissingTypeStubs]

    return onnxruntime


def _has_rare_outputs(session: Any) -> bool:
    return any(value.type in ("tensor(bfloat16)",) or "float8" in value.type for value in session.get_outputs())


def feed(value: Any) -> Any:
    """Return a contiguous array of the value, or where numpy lacks its type, an `OrtValue` of its bytes."""
    if isinstance(value, int):
        return np.asarray(value, np.int64)
    if is_torch_tensor(value):
        import torch

        tensor = value.detach().resolve_conj().resolve_neg().cpu().contiguous()
        if tensor.is_complex():
            tensor = torch.view_as_real(tensor)
        name = str(tensor.dtype).removeprefix("torch.")
        if name not in _ONNX_TYPES:
            return tensor.numpy()
        bits = tensor.view(torch.int16 if tensor.element_size() == 2 else torch.uint8).numpy()
        return _rare(bits, name)
    if not value.dtype.isnative:
        # ONNX Runtime ignores the order of bytes.
        value = value.astype(value.dtype.newbyteorder("="))
    array = np.ascontiguousarray(value).reshape(value.shape)
    if array.dtype.name in _ONNX_TYPES:
        return _rare(array.view(np.int16 if array.itemsize == 2 else np.uint8), array.dtype.name)
    if array.dtype.kind == "c":
        return array.view(f"f{array.itemsize // 2}").reshape(*array.shape, 2)
    return array


def _rare(bits: np.ndarray[Any, Any], name: str) -> Any:
    unsigned = bits.view(np.uint16 if bits.itemsize == 2 else np.uint8)
    return _onnxruntime().OrtValue.ortvalue_from_numpy_with_onnx_type(unsigned, _ONNX_TYPES[name])


def as_passed(results: Sequence[Any], *, with_torch: bool) -> list[Any]:
    """Return arrays of numpy as tensors of torch, or as they are."""
    arrays = [np.asarray(result) for result in results]
    if not with_torch:
        return arrays
    import torch

    return [torch.from_numpy(array) for array in arrays]


def _from_ort(value: Any, with_torch: bool) -> Any:
    if with_torch:
        import torch

        return torch.from_dlpack(value)
    if "float8" in value.data_type() or value.data_type() == "tensor(bfloat16)":
        raise NotSupported(f"numpy has no type for an output that is {value.data_type()}; pass tensors of torch")
    return value.numpy()


def as_complex(value: Any) -> Any:
    """Return a tensor or array of pairs, the form of complex numbers in models, as complex numbers."""
    if is_torch_tensor(value):
        import torch

        # `view_as_complex` checks strides, which mean nothing for an empty tensor.
        return torch.view_as_complex(value if value.numel() else torch.zeros(value.shape, dtype=value.dtype))
    return np.ascontiguousarray(value).view(np.result_type(value.dtype, np.complex64))[..., 0]
