"""A session of OpenVINO over one model of a bundle, where it computes as the model says."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any, ClassVar

import numpy as np

from aotexport_runtime.bundle.read import Bundle
from aotexport_runtime.engines.candidates import OPENVINO
from aotexport_runtime.engines.onnx.session import Session, check_names, threads_of
from aotexport_runtime.errors import CheckFailed, NotSupported, first_line
from aotexport_runtime.schema.manifest import OnnxModel
from aotexport_runtime.schema.program import ArgumentInput, Program, StateInput
from aotexport_runtime.values import sizes

_WAY_OUT = "Load target `onnx`, or `portable`"
_PLACES = ("Exception from ", "Check ", "FrontEnd API failed", "Model wasn't fully converted", "While validating")
"""How lines begin that say where OpenVINO failed, and not why."""


@dataclass(frozen=True, kw_only=True)
class OpenVino:
    """How OpenVINO runs a bundle's models, on processors.

    Attributes:
        threads: threads of a call; None: as many as torch has; without torch, as OpenVINO chooses.
        properties: further properties of `openvino.Core.compile_model`, such as `CACHE_DIR`, a folder of compiled
            models, each as large as its weights; by default none are kept.
    """

    engine: ClassVar[str] = OPENVINO
    threads: int | None = None
    properties: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))

    def open(self, bundle: Bundle, model: OnnxModel, symbols: Mapping[str, int] | None = None) -> Session:
        """Open a model; see `ModelRuntime`. `symbols`: for sizes by symbol; None: for all."""
        try:
            import openvino
        except ImportError:
            raise NotSupported(
                "target `openvino` needs OpenVINO: `pip install 'aotexport-runtime[openvino]'`"
            ) from None
        except OSError as error:  # It writes to the user's home, which need not be there.
            raise NotSupported(f"OpenVINO cannot be imported here: {first_line(error)}. {_WAY_OUT}") from None
        file, core = bundle.intact_file(model.file), openvino_core()
        try:
            read = core.read_model(file)
            if symbols:
                read.reshape(_shapes(bundle.program(model.program), model, symbols))
            defaults = _state_as_inputs(read, model)
            ports = [name for port in read.inputs if (name := port.get_any_name()) not in model.state_inputs.values()]
            check_names(model, ports, _outputs(read, model), [*defaults])
            reason = why_inexact(read)
            if reason is None:
                is_checked = indices_in_bounds(read)
                compiled = partial(core.compile_model, read, "CPU", _properties(self))
                infer = Infer(compiled, defaults, is_checked=is_checked)
                return Session(handle=infer.request.get_compiled_model(), device="CPU", infer=infer)
        except RuntimeError as error:
            reason = _cause(error)
        version = openvino.__version__.partition("-")[0]
        raise NotSupported(f"OpenVINO {version} does not run `{model.file}`: {reason}. {_WAY_OUT}")


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


def _shapes(program: Program, model: OnnxModel, symbols: Mapping[str, int]) -> dict[str, list[int]]:
    """Return the shape of each input of a model, for sizes by symbol."""
    specs = [spec for spec in program.inputs if not isinstance(spec, StateInput)]
    shapes = [spec.meta.shape if isinstance(spec, ArgumentInput) else () for spec in specs]
    found = [[sizes.evaluate(size, symbols) for size in shape] for shape in shapes]
    return dict(zip(model.inputs, found, strict=True))


def _properties(options: OpenVino) -> dict[str, Any]:
    properties: dict[str, Any] = {
        "INFERENCE_PRECISION_HINT": "f32",
        "PERFORMANCE_HINT": "LATENCY",
        "NUM_STREAMS": 1,
        "ENABLE_CPU_PINNING": False,
    }
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


_LARGE, _SMALL = 1 << 20, 1 << 18
"""Least bytes of large results, and most bytes of the arguments and results of a small model."""


class Infer:
    """Runs a compiled model on arrays; see `Session.infer`."""

    def __init__(self, compile_model: Callable[[], Any], defaults: dict[str, Any], *, is_checked: bool) -> None:
        from openvino import Tensor

        self._compile = compile_model
        self._defaults = defaults
        self._is_checked = is_checked
        compiled = compile_model()
        ports = [port for op in compiled.get_runtime_model().get_ops() for port in op.outputs()]
        self._is_fixed = all(port.get_partial_shape().is_static for port in ports)
        known = [(port.shape, port.element_type.to_dtype()) for port in compiled.outputs] if self._is_fixed else []
        # To write large results to memory of their own costs less than to copy them.
        results = [np.empty(*each) for each in known]
        self._own = known if sum(array.nbytes for array in results) >= _LARGE else []
        self._tensor = partial(Tensor, shared_memory=True)
        self._integers = [port.get_any_name() for port in compiled.inputs if port.element_type.to_dtype().kind in "iu"]
        self._arguments: dict[str, np.ndarray[Any, Any]] = {}
        self._results: list[np.ndarray[Any, Any]] = []
        if known:
            shapes = {port.get_any_name(): (port.shape, port.element_type.to_dtype()) for port in compiled.inputs}
            arguments = {name: np.empty(*each) for name, each in shapes.items()}
            if sum(array.nbytes for array in (*arguments.values(), *results)) <= _SMALL:
                # To hand new arrays to a small model takes longer than to copy to and from those that it has.
                self._arguments, self._results = arguments, results
        self.request = self._opened(compiled)
        self._lock = threading.Lock()

    def _opened(self, compiled: Any) -> Any:
        request = compiled.create_infer_request()
        if self._arguments:
            request.set_input_tensors(dict(enumerate(map(self._tensor, self._arguments.values()))))
            request.set_output_tensors(dict(enumerate(map(self._tensor, self._results))))
        return request

    def _infer_small(self, feeds: Mapping[str, Any]) -> list[Any]:
        for name, array in self._arguments.items():
            if array.shape != feeds[name].shape:
                raise RuntimeError(f"`{name}` has shape {feeds[name].shape}, and the model takes {array.shape}")
            array[...] = feeds[name]
        self.request.infer(share_outputs=True)
        return [array.copy() for array in self._results]

    def __call__(self, outputs: Sequence[str], feeds: dict[str, Any]) -> Sequence[Any]:
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
            results: Sequence[Any] = [np.empty(*each) for each in self._own]
            try:
                if results:
                    self.request.set_output_tensors(dict(enumerate(map(self._tensor, results))))
                if self._arguments:
                    results = self._infer_small(feeds)
                elif self._is_fixed:
                    found = self.request.infer(feeds, share_inputs=True, share_outputs=bool(results))
                    results = results or found.to_tuple()
                else:
                    # With one thread, `infer` raises nothing where an operator fails, as it may at sizes of the moment.
                    self.request.start_async(feeds, share_inputs=True)
                    self.request.wait()
                    results = self.request.results.to_tuple()
            except RuntimeError as error:
                # After a failure, a compiled model gives results of wrong shapes.
                self.request = self._opened(self._compile())
                raise CheckFailed(f"OpenVINO failed: {_cause(error)}. {_WAY_OUT}") from None
        if self._is_checked and not results[-1]:
            raise CheckFailed("an index is out of bounds")
        return results[: len(outputs)]


# --- where OpenVINO computes otherwise than the model says -------------------------------------------------
#
# Its plugin for processors has no float64 and no int64. It computes integers in 32 bits or in float32, and keeps those
# of fewer bits in their range where eager wraps around. Not all of its operators check indices, and a model with one
# that does is not to be called again.

LARGEST = 1 << 24
"""Least integer that float32 may round; none of that size is taken."""

_INTEGERS = ("i8", "u8", "i16", "u16", "i32", "u32", "i64", "u64")
_INDEXED = {"Gather": 2, "GatherElements": 0, "GatherND": 0, "ScatterElementsUpdate": 3, "ScatterNDUpdate": 0}
_INDEXED["ScatterUpdate"] = 3
"""Operators with indices as second input, and the input that says their axis; 0: an attribute, or none."""

_SLICES = {
    *("Reshape", "Squeeze", "Unsqueeze", "Broadcast", "Tile", "Slice", "StridedSlice", "Split", "VariadicSplit"),
    *("Transpose", "TopK"),
}
"""Operators whose other inputs than the first are sizes and places."""

_MOVES = {
    *_SLICES,
    *("Parameter", "Identity", "Concat", "Select", "Gather", "GatherElements", "GatherND", "ScatterElementsUpdate"),
    *("ScatterNDUpdate", "ScatterUpdate", "ReduceMax", "ReduceMin", "Minimum", "Maximum", "Reverse", "Roll", "Pad"),
    *("ReverseSequence", "NonZero", "Range"),
}
"""Operators that compute no integers other than those of their inputs, and sizes."""


def why_inexact(model: Any) -> str | None:
    """Return why OpenVINO may compute other numbers than the model says; None: it does not.

    Args:
        model: an `openvino.Model`, as read.
    """
    given: set[tuple[str, int]] = set()  # Outputs that depend on values of arguments, not on their sizes alone.
    for op in model.get_ordered_ops():
        kind, sources = op.get_type_name(), op.input_values()
        if kind in ("If", "Loop", "TensorIterator"):
            return f"it has a branch or a loop (`{kind}`), whose indices and integers are not checked"
        depends = kind == "Parameter" or any(
            (s.get_node().get_friendly_name(), s.get_index()) in given for s in sources
        )
        if not depends or kind in ("ShapeOf", "Result"):
            continue
        if any(map(_is_large, sources[:1] if kind in _SLICES else sources)):
            return (
                f"it has integers of {LARGEST:,} or more (`{kind}`), and OpenVINO computes with fewer bits than eager"
            )
        for output in (each for each in op.outputs() if each.get_target_inputs()):
            dtype = output.element_type.get_type_name()
            if dtype in ("f64", "bf16") or dtype.startswith("f8"):
                return f"it computes in {dtype}, and OpenVINO in another dtype"
            is_zero = kind == "Subtract" and sources[0] == sources[1]  # of labels that a loss ignores
            if dtype in _INTEGERS and kind not in _MOVES and not is_zero and not _widens(op, dtype):
                return f"it computes integers ({dtype}) by `{kind}`, which OpenVINO does with fewer bits than eager"
            given.add((op.get_friendly_name(), output.get_index()))
    return None


def _is_large(source: Any) -> bool:
    """Return whether an input is a constant with an integer of more bits than OpenVINO has."""
    node = source.get_node()
    if node.get_type_name() != "Constant" or source.get_element_type().get_type_name() not in _INTEGERS:
        return False
    return node.data.size > 0 and bool(node.data.max() >= LARGEST or node.data.min() <= -LARGEST)


def _widens(op: Any, dtype: str) -> bool:
    """Return whether an operator converts truths or integers to integers of as many bits or of 32 and more."""
    source = op.input_value(0).get_element_type().get_type_name() if op.get_type_name() == "Convert" else ""
    return source == "boolean" or (source in _INTEGERS and dtype in (source, "i32", "i64"))


def indices_in_bounds(model: Any) -> bool:
    """Add an output to a model that says whether all indices are in bounds, as ONNX defines them; others become 0.

    Args:
        model: an `openvino.Model`, as read; changed.

    Returns:
        Whether it has indices that are no constants; without any it is left as it is.
    """
    from openvino import opset13 as ops

    indexed = [op for op in model.get_ordered_ops() if op.get_type_name() in _INDEXED]
    holds = [_checked(op, ops) for op in indexed if op.input_value(1).get_node().get_type_name() != "Constant"]
    if not holds:
        return False
    whole = holds[0]
    for other in holds[1:]:
        whole = ops.logical_and(whole, other)
    model.add_results([ops.result(whole)])
    return True


def _checked(op: Any, ops: Any) -> Any:
    """Return the truth that an operator's indices are in bounds; replace others by 0."""
    kind, data, indices = op.get_type_name(), op.input_value(0), op.input_value(1)
    if kind.endswith(("ND", "NDUpdate")):
        first = op.get_attributes().get("batch_dims", 0)
        axes = range(first, first + indices.get_partial_shape()[-1].get_length())
    elif _INDEXED[kind]:
        axes = int(op.input_value(_INDEXED[kind]).get_node().data) % len(data.get_partial_shape())
    else:
        axes = op.get_attributes()["axis"] % len(data.get_partial_shape())
    size = ops.gather(ops.shape_of(data, "i64"), _constant(ops, axes), _constant(ops, 0))
    wide = ops.convert(indices, "i64")
    inside = ops.logical_and(ops.less(wide, size), ops.greater_equal(wide, ops.negative(size)))
    zero = ops.convert(_constant(ops, 0), indices.get_element_type())
    op.input(1).replace_source_output(ops.select(inside, indices, zero).output(0))
    return ops.reduce_logical_and(inside, _constant(ops, range(len(indices.get_partial_shape()))), False)


def _constant(ops: Any, value: Any) -> Any:
    return ops.constant(np.array(value, np.int64))
