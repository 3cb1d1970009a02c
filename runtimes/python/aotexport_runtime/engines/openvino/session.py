"""A session of OpenVINO over one model of a bundle."""

from __future__ import annotations

import functools
import hashlib
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any, ClassVar

import msgspec

from aotexport_runtime.bundle.read import Bundle
from aotexport_runtime.engines.candidates import OPENVINO
from aotexport_runtime.engines.onnx.session import Session, check_names, threads_of
from aotexport_runtime.engines.openvino.exact import LARGEST, indices_in_bounds, why_inexact
from aotexport_runtime.errors import CheckFailed, NotSupported, first_line
from aotexport_runtime.execution.user_cache import cache_folder
from aotexport_runtime.schema.manifest import OnnxModel

_WAY_OUT = "Load target `onnx`, or `portable`"
_PLACES = ("Exception from ", "Check ", "FrontEnd API failed", "Model wasn't fully converted", "While validating")
"""How lines begin that say where OpenVINO failed, and not why."""


@dataclass(frozen=True, kw_only=True)
class OpenVino:
    """How OpenVINO runs a bundle's models, on processors.

    Attributes:
        threads: threads of a call; None: as many as torch has; without torch, as OpenVINO chooses.
        properties: further properties of `openvino.Core.compile_model`, such as `CACHE_DIR`, the folder of compiled
            models, by default in the user's cache folder.
    """

    engine: ClassVar[str] = OPENVINO
    threads: int | None = None
    properties: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))

    def open(self, bundle: Bundle, model: OnnxModel) -> Session:
        """Open a model; see `ModelRuntime`."""
        try:
            import openvino
        except ImportError:
            raise NotSupported(
                "target `openvino` needs OpenVINO: `pip install 'aotexport-runtime[openvino]'`"
            ) from None
        file, core = bundle.intact_file(model.file), openvino_core()
        try:
            read = core.read_model(file)
            defaults = _state_as_inputs(read, model)
            ports = [port.get_any_name() for port in read.inputs]
            names = list(model.inputs), list(model.state_inputs.values())
            check_names(model, [n for n in ports if n not in names[1]], _outputs(read, model), [*defaults])
            reason, infer = why_inexact(read), None
            if reason is None:
                is_checked = indices_in_bounds(read)
                compiled = partial(core.compile_model, read, "CPU", _properties(bundle, self))
                infer = Infer(compiled, defaults, is_checked=is_checked)
        except RuntimeError as error:
            reason, infer = _cause(error), None
        if infer is None:
            version = openvino.__version__.partition("-")[0]
            raise NotSupported(f"OpenVINO {version} does not run `{model.file}`: {reason}. {_WAY_OUT}")
        return Session(handle=infer.request.get_compiled_model(), device="CPU", infer=infer)


@functools.cache
def openvino_core() -> Any:
    """Return OpenVINO, which stays to the end of the process.

    Its plugin for processors gives the thread that loads it a stack for signals, and frees it where the plugin goes, in
    whatever thread: the next signal (Ctrl-C) would end the process. Source: OpenVINO 2026.4, `CPUSpecialSetup`.
    """
    import openvino

    return openvino.Core()


def _cause(error: RuntimeError) -> str:
    """Return the first line of an error of OpenVINO that is no place in its own sources."""
    lines = [line.strip() for line in str(error).splitlines()]
    causes = [line for line in lines if line and not line.startswith(_PLACES)]
    return first_line(RuntimeError(causes[0])) if causes else first_line(error)


def _properties(bundle: Bundle, options: OpenVino) -> dict[str, Any]:
    properties: dict[str, Any] = {
        "INFERENCE_PRECISION_HINT": "f32",
        "PERFORMANCE_HINT": "LATENCY",
        "NUM_STREAMS": 1,
        "ENABLE_CPU_PINNING": False,
    }
    folder = cache_folder("openvino")
    if folder is not None:
        # Apart by bundle: OpenVINO knows a model again by its path and structure, not by its weights.
        properties["CACHE_DIR"] = str(folder / hashlib.sha256(msgspec.json.encode(bundle.manifest.files)).hexdigest())
    if (threads := threads_of(options.threads)) is not None:
        properties["INFERENCE_NUM_THREADS"] = threads
    return properties | dict(options.properties)


def _outputs(read: Any, model: OnnxModel) -> list[str]:
    """Return the names of the model's outputs, each as the manifest has it where it has several."""
    names = [port.get_names() for port in read.outputs]
    expected = [*model.outputs, *[""] * len(names)]
    return [name if name in found else min(found, default="") for found, name in zip(names, expected, strict=False)]


def _state_as_inputs(read: Any, model: OnnxModel) -> dict[str, Any]:
    """Make inputs of the constants that calls replace; return their values, by name."""
    from openvino import opset13 as ops

    wanted = set(model.state_inputs.values())
    defaults: dict[str, Any] = {}
    for node in read.get_ops():
        names = wanted & {*node.output(0).get_names()} if node.get_type_name() == "Constant" else ()
        for name in names:
            defaults[name] = node.data.copy()
            parameter = ops.parameter(node.output(0).shape, node.output(0).element_type, name)
            parameter.output(0).set_names({name})
            read.add_parameters([parameter])
            for target in node.output(0).get_target_inputs():
                target.replace_source_output(parameter.output(0))
    return defaults


class Infer:
    """Runs a compiled model on arrays; see `Session.infer`."""

    def __init__(self, compile_model: Callable[[], Any], defaults: dict[str, Any], *, is_checked: bool) -> None:
        self._compile = compile_model
        self._defaults = defaults
        self._is_checked = is_checked
        compiled = compile_model()
        self._integers = [port.get_any_name() for port in compiled.inputs if port.element_type.to_dtype().kind in "iu"]
        self.request = compiled.create_infer_request()
        self._lock = threading.Lock()

    def __call__(self, outputs: Sequence[str], feeds: dict[str, Any]) -> list[Any]:
        """Run the model.

        Raises:
            CheckFailed: an index is out of bounds, an integer too large for OpenVINO, or OpenVINO fails.
        """
        feeds = {**self._defaults, **feeds}
        for name in self._integers:
            array = feeds[name]
            if array.size and (array.max() >= LARGEST or array.min() <= -LARGEST):
                raise CheckFailed(
                    f"`{name}` holds integers of {LARGEST:,} or more, and OpenVINO computes with fewer bits than "
                    f"eager. {_WAY_OUT}"
                )
        with self._lock:
            try:
                # With one thread, `infer` returns results of the call before where an operator fails.
                self.request.start_async(feeds, share_inputs=True)
                self.request.wait()
            except RuntimeError as error:
                # After a failure, a compiled model gives results of wrong shapes.
                self.request = self._compile().create_infer_request()
                raise CheckFailed(f"OpenVINO failed: {_cause(error)}. {_WAY_OUT}") from None
            results = self.request.results.to_tuple()
        if self._is_checked and not results[-1]:
            raise CheckFailed("an index is out of bounds")
        return results[: len(outputs)]
