"""Patches of what a model asks of torch beside operators, and a mode does not see (`watch.py`), while it is traced.

Some record facts that a program may then be fixed to: reads of dtypes, autocast, grad and inference mode.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.autograd import forward_ad

from aotexport.capture.effects import detection, distributed, grad_mode, recurrence
from aotexport.capture.effects.applied_function import function_of_subgraphs
from aotexport.capture.effects.autograd_functions import record_application
from aotexport.capture.effects.record import Effects
from aotexport.errors import ExportFailed
from aotexport.model.array_proxies import ArrayProxy, is_proxy, tensor_made_of, tensor_within
from aotexport.model.source_lines import is_user_file, user_line
from aotexport.process.patches import Patch, caller
from aotexport.torch_internals.calls import FakeTensor
from aotexport.torch_internals.names import AutogradFunctionApply
from aotexport.torch_internals.subclasses import within_subclass
from aotexport.torch_internals.subgraphs import marks_inlined
from aotexport.torch_internals.tracing import node_of, record_call, traces_above_autograd, tracing_paused
from aotexport_runtime.execution import higher_order
from aotexport_runtime.execution.higher_order import Step
from aotexport_runtime.guards.caller import records_gradients
from aotexport_runtime.module.bundle_module import BundleModule
from aotexport_runtime.values import arrays
from aotexport_runtime.values.subclasses import is_wrapper


def patches(effects: Effects) -> list[Patch]:
    """Return patches of functions and methods that tracing does not see."""
    return [
        Patch(torch.random, "default_generator", _Generator(), "Refuse a model that sets the random state"),
        _grad_mode(effects),
        *_conversions(),
        *_control_flow(),
        _contiguous(effects),
        *_questions(effects),
        _subgraphs_of_functions(effects),
        Patch(nn.Module, "_apply", _apply, "Refuse conversions of a module that change its tensors"),
        *_inference_mode(),
        *distributed.patches(),
        *_unheld_kinds(),
        _saved_tensors(effects),
        *recurrence.patches(),
        *detection.patches(),
        *marks_inlined(),
    ]


_LAYERS = str(Path(nn.__file__).parent)
"""Torch's own layers count as the model's code; code that operators run on fake tensors does not."""
_AUTOCAST = str(Path(torch.amp.__file__).parent)
"""Autocast regions and custom autograd functions (`torch.amp.custom_fwd`) query autocast from here."""
_AUTOCAST_QUERIES = ("is_autocast_enabled", "get_autocast_dtype", "is_autocast_cpu_enabled", "get_autocast_cpu_dtype")


def refused(call: str, way_out: str) -> Any:
    """Return a function that refuses the model's call of `call`."""

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise ExportFailed(f"{user_line()}the model calls `{call}`, which a bundle cannot hold. {way_out}")

    return refuse


def is_models_code(frame: FrameType) -> bool:
    """Return whether a frame runs what counts as the model's code."""
    file = frame.f_code.co_filename
    return is_user_file(file) or file.startswith(_LAYERS)


def note_dtypes(effects: Effects, values: Iterable[Any], reader: FrameType) -> None:
    """Note that the model's code, if it is that, reads the dtypes of the tensors among some values."""
    if is_models_code(reader):
        tensors = [value for value in values if isinstance(value, torch.Tensor)]
        effects.dtypes_read.update(node_of(each) for each in tensors if not isinstance(each, nn.Parameter))


def _questions(effects: Effects) -> list[Patch]:
    """Return patches that record what the model asks for."""
    dtype_of: Any = torch.Tensor.dtype.__get__  # type: ignore[attr-defined]

    def dtype(tensor: torch.Tensor) -> torch.dtype:
        # A mode is off within torch's functions.
        note_dtypes(effects, (tensor,), caller())
        return dtype_of(tensor)

    def asks_autocast(asker: FrameType) -> None:
        effects.asks_autocast |= is_models_code(asker) or asker.f_code.co_filename.startswith(_AUTOCAST)

    def asks_inference_mode(asker: FrameType) -> None:
        if is_user_file(asker.f_code.co_filename):
            effects.reads.add("inference_mode")

    def takes_tangents(asker: FrameType) -> None:
        # In inference mode eager loses them.
        effects.reads.add("inference_mode")

    def noted(owner: Any, name: str, note: Callable[[FrameType], None]) -> Patch:
        function = getattr(owner, name)

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            note(caller())
            return function(*args, **kwargs)

        return Patch(owner, name, call, "Record that the model asks for autocast or inference mode, or takes tangents")

    return [
        Patch(torch.Tensor, "dtype", property(dtype), "Record that the model reads dtypes"),
        *(noted(torch, name, asks_autocast) for name in _AUTOCAST_QUERIES),
        noted(torch, "is_inference_mode_enabled", asks_inference_mode),
        noted(forward_ad, "make_dual", takes_tangents),
    ]


_CHOOSING = (records_gradients.__code__, BundleModule.forward.__code__)
"""Code by which a loaded bundle chooses its program."""


def _grad_mode(effects: Effects) -> Patch:
    """Return a patch that records reads of the grad mode."""

    def is_grad_enabled() -> bool:
        # Outside of the model's own regions, the mode is the caller's.
        if grad_mode.within_region():
            return grad_mode.is_grad_enabled()
        # A loaded bundle chooses its program by the mode; what that is fixed to is inherited.
        if caller().f_code in _CHOOSING:
            return effects.grad
        if not is_user_file(caller().f_code.co_filename):
            return grad_mode.is_grad_enabled()
        effects.reads.add("grad_mode")
        return effects.grad

    return Patch(torch, "is_grad_enabled", is_grad_enabled, "Record that the model reads the grad mode")


def _control_flow() -> list[Patch]:
    """Return patches that record branches and loops of a loaded bundle's graph with their subgraphs."""
    branch_of, loop_of = higher_order.branch, higher_order.loop

    def branch(predicate: Any, yes: Step, no: Step, operands: list[Any]) -> tuple[Any, ...]:
        if not isinstance(predicate, torch.Tensor | torch.SymBool):
            return branch_of(predicate, yes, no, operands)
        return tuple(torch.ops.higher_order.cond(predicate, yes, no, tuple(operands)))

    def loop(condition: Step, step: Step, carried: list[Any], additional: list[Any]) -> tuple[Any, ...]:
        if not all(isinstance(value, torch.Tensor) for value in carried):
            return loop_of(condition, step, carried, additional)

        def goes_on(*values: Any) -> Any:
            return condition(*values)[0]

        return tuple(torch.ops.higher_order.while_loop(goes_on, step, tuple(carried), tuple(additional)))

    def scan(combine: Step, initial: list[Any], xs: list[Any], additional: list[Any]) -> tuple[Any, ...]:
        return tuple(torch.ops.higher_order.scan(combine, initial, xs, tuple(additional)))

    def map_rows(step: Step, xs: list[Any], additional: list[Any]) -> tuple[Any, ...]:
        return tuple(torch.ops.higher_order.map_impl(step, tuple(xs), tuple(additional)))

    return [
        Patch(higher_order, function.__name__, function, "Record branches and loops of a loaded bundle's graph")
        for function in (branch, loop, scan, map_rows)
    ]


def _contiguous(effects: Effects) -> Patch:
    """Return a patch that records the model's calls of `contiguous`."""
    original, is_contiguous = torch.Tensor.contiguous, torch.Tensor.is_contiguous

    def contiguous(self: torch.Tensor, memory_format: torch.memory_format = torch.contiguous_format) -> torch.Tensor:
        # Python returns a contiguous tensor itself, and the trace does not see the call.
        own = is_models_code(caller()) and not within_subclass()
        if not own or isinstance(self, nn.Parameter) or not is_contiguous(self, memory_format=memory_format):
            return original(self, memory_format=memory_format)
        twin = _recorded_contiguous(self, memory_format)
        if twin is None:
            effects.reads.add("layout")
        return self if twin is None else twin

    return Patch(torch.Tensor, "contiguous", contiguous, "Record `contiguous` where the example is contiguous already")


def _subgraphs_of_functions(effects: Effects) -> Patch:
    """Return a patch that records custom autograd functions as functions."""

    def apply_subgraphs(operator: Any, forward: Any, backward: Any, *args: Any, **described: Any) -> Any:
        function = function_of_subgraphs(forward, backward, described)
        if traces_above_autograd():
            return record_application(function, args, {})
        if not effects.above_autograd:
            effects.lost("of code that torch compiles", "a function transform is beside it")
        # Torch runs subgraphs several times to see their results; one of these runs is recorded.
        return function.apply(*args)

    reason = "Record custom functions that Dynamo has taken apart"
    return Patch(AutogradFunctionApply, "__call__", apply_subgraphs, reason)


class _Generator:
    """The default random generator, which refuses the model's functions of `torch.random` that set its state.

    Other threads, and torch's own code, have it as it is.
    """

    def __init__(self) -> None:
        self._generator, self._thread = torch.default_generator, threading.get_ident()

    def __getattr__(self, name: str) -> Any:
        frame, function = sys._getframe(1), ""
        while frame.f_back is not None and frame.f_code.co_filename in (torch.random.__file__, contextlib.__file__):
            frame, function = frame.f_back, frame.f_code.co_name
        if threading.get_ident() == self._thread:
            if function in ("manual_seed", "seed", "initial_seed"):
                refused(f"torch.{function}", "Seed outside of the model")()
            if function in ("set_rng_state", "fork_rng", "__enter__") and is_user_file(frame.f_code.co_filename):
                name = "fork_rng" if function == "__enter__" else function
                refused(f"torch.random.{name}", "Draw outside of the model, and pass the numbers")()
        return getattr(self._generator, name)


def _apply(self: nn.Module, function: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> nn.Module:
    """Replace conversions of a module (`to`, `float`, `cpu`): do nothing, refusing those that change a tensor."""
    for name, tensor in (*self.named_parameters(recurse=recurse), *self.named_buffers(recurse=recurse)):
        new = function(tensor)
        one, other = ((each.dtype, each.device, each.shape, each.stride()) for each in (tensor, new))
        if one != other:
            refused(f"Module.to` (or the like), which changes `{name}`, `", "Convert the module before the export")()
    return self


def _inference_mode() -> list[Patch]:
    """Return patches that turn `torch.inference_mode`, which tracing does not see, into `torch.no_grad`."""
    region = torch.inference_mode

    def enter(self: Any) -> None:
        self._region = torch.no_grad() if self.mode else torch.enable_grad()
        self._region.__enter__()

    def leave(self: Any, *exception: Any) -> None:
        self._region.__exit__(*exception)

    reason = "Record regions of inference mode as regions without gradients"
    return [Patch(region, "__enter__", enter, reason), Patch(region, "__exit__", leave, reason)]


def _unheld_kinds() -> list[Patch]:
    """Return patches that refuse to make tensors of kinds that no graph holds."""
    nested, reason = torch.nested, "Refuse tensors of kinds that no graph holds"
    way_out = "Compute on values and offsets, or pad"
    masked = refused("MaskedTensor", "Keep values and mask as two tensors")
    return [
        Patch(torch.masked.MaskedTensor, "__new__", masked, reason),
        *(
            Patch(nested, name, refused(f"torch.nested.{name}", way_out), reason)
            for name in ("as_nested_tensor", "narrow", "nested_tensor", "nested_tensor_from_jagged")
        ),
    ]


def _saved_tensors(effects: Effects) -> Patch:
    """Return a patch that refuses functions of the model that change what backward reads; torch's own keep values."""
    original = torch.autograd.graph.saved_tensors_hooks.__init__
    way_out = "Use `save_on_cpu` or a checkpoint, or write a custom autograd function"
    refuse = refused("torch.autograd.graph.saved_tensors_hooks", way_out)

    def make(self: Any, pack_hook: Any, unpack_hook: Any) -> None:
        code = getattr(pack_hook, "__code__", None)
        if effects.grad and (code is None or is_user_file(code.co_filename)):
            refuse()
        original(self, pack_hook, unpack_hook)

    reason = "Refuse hooks on saved tensors, which a graph does not call"
    return Patch(torch.autograd.graph.saved_tensors_hooks, "__init__", make, reason)


def _recorded_contiguous(tensor: torch.Tensor, memory_format: torch.memory_format) -> torch.Tensor | None:
    """Record that a contiguous tensor is made contiguous, for calls in which it is not.

    Returns:
        Another tensor on the same memory, so that the trace does not take the result for `tensor`; None: no forward
        graph is being traced, or it does not know the tensor.
    """
    if not traces_above_autograd() or is_wrapper(tensor):
        return None
    with tracing_paused() as tracer:
        twin = tensor.view_as(tensor)
        try:
            record_call(tracer, torch.ops.aten.contiguous.default, (tensor,), twin, memory_format=memory_format)
        except LookupError:
            return None
    return twin


# --- arrays of NumPy, see `array_proxies` ------------------------------------------------------------------------


def _conversions() -> list[Patch]:
    """Return patches of functions that take or give arrays, and that no mode sees: those of loaded bundles too."""
    from_numpy, why_not, tensor_of, array_of = torch.from_numpy, arrays.why_not, arrays.tensor_of, arrays.array_of

    def array_in_trace(tensor: torch.Tensor) -> Any:
        return ArrayProxy(tensor) if isinstance(tensor, FakeTensor) else array_of(tensor)

    reason = "Record conversions between tensors and arrays of NumPy"
    return [
        Patch(torch, "from_numpy", lambda a: tensor_made_of(a) if is_proxy(a) else from_numpy(a), reason),
        Patch(arrays, "why_not", lambda value: None if is_proxy(value) else why_not(value), reason),
        Patch(arrays, "tensor_of", lambda a: tensor_within(a) if is_proxy(a) else tensor_of(a), reason),
        Patch(arrays, "array_of", array_in_trace, reason),
    ]


INDEXING = (torch.Tensor.__getitem__, torch.Tensor.__setitem__)
"""Functions whose arguments may be arrays; not patched: Python leaves tensors sequences to C where that is undone."""


def without_arrays(value: Any) -> Any:
    """Return an argument of `INDEXING`, its arrays replaced by tensors."""
    if type(value) is tuple:
        return tuple(map(without_arrays, value))
    return tensor_made_of(value) if is_proxy(value) else value


def converted(
    array: Any, dtype: torch.dtype | None = None, device: Any = None, *, copy: bool | None, pin_memory: bool = False
) -> torch.Tensor:
    """Return the tensor that `torch.tensor`, `as_tensor` or `asarray` makes of the proxy of an array."""
    tensor = tensor_made_of(array)
    return tensor.to(device=device or tensor.device, dtype=dtype or tensor.dtype, copy=bool(copy))
