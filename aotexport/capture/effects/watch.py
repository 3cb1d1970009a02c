"""The mode that watches what a model asks of torch beside operators, while it is traced.

A handler records the call as operators of the same meaning, notes it, or refuses it: a program without it would be
silently wrong. `patched.py` patches what a mode does not see.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterable
from contextvars import ContextVar
from types import FrameType
from typing import Any

import torch
from torch import nn, overrides

from aotexport.capture.effects import grad_mode
from aotexport.capture.effects.hooks import record_hook
from aotexport.capture.effects.patched import converted, is_models_code, note_dtypes, refused
from aotexport.capture.effects.record import Effects
from aotexport.errors import ExportFailed
from aotexport.model.array_proxies import ArrayProxy, is_proxy
from aotexport.model.source_lines import is_user_file, own_room, user_line
from aotexport.torch_internals.calls import FakeTensor, tree_leaves
from aotexport.torch_internals.subclasses import within_subclass
from aotexport.torch_internals.tracing import UnpausedMode, is_functionalised, node_of, traces_above_autograd
from aotexport_runtime.values.subclasses import is_wrapper

_LAYOUTS = (torch.Tensor.stride, torch.Tensor.storage_offset, torch.Tensor.is_contiguous, torch.Tensor.dim_order)
_SPARSE = tuple(f"sparse_{layout}_tensor" for layout in ("bsc", "bsr", "compressed", "csc", "csr"))
_ON_ARRAYS = "Compute on values and indices (`index_select`, `index_add`), or on dense tensors"
_ON_HOOKS = "Register hooks on the loaded bundle's parameters, inputs or outputs instead"
_GRADIENT: Any = torch.Tensor.grad
_TENSOR: Any = torch.Tensor
_READ_DTYPES: dict[Any, Callable[..., Iterable[Any]]] = {
    **dict.fromkeys((_TENSOR.itemsize.__get__, _TENSOR.nbytes.__get__, _TENSOR.element_size), lambda self: (self,)),
    torch.result_type: lambda *args, **named: (*args, *named.values()),
    # Another tensor's dtype, and the text of its own.
    _TENSOR.to: lambda self, *to, other=None, **_: (*to[:1], other),
    _TENSOR.type: lambda self, *to, **named: () if to or named else (self,),
    _TENSOR.new_tensor: lambda self, *data, dtype=None, **_: () if dtype else (self,),
}
"""The values whose dtypes a function reads, of its arguments; `dtype` itself is read in torch's layers, too."""
_VERBS = {_GRADIENT.__get__: "reads", _GRADIENT.__set__: "sets", _GRADIENT.__delete__: "deletes"}

current_watch: ContextVar[Watch] = ContextVar("current_watch")
"""The mode of the trace that is going on; entered again for code of the model that an operator calls."""


class Watch(UnpausedMode):
    """Call handlers in place of functions, methods and properties of torch; a handler gets the frame that asks."""

    def __init__(self, effects: Effects) -> None:
        """Note what the model does in `effects`."""
        super().__init__()
        self._effects = effects
        tensor: Any = torch.Tensor
        after = tensor.register_post_accumulate_grad_hook
        self._handlers: dict[Any, Callable[..., Any]] = {
            **dict.fromkeys((torch.tensor, torch.as_tensor, torch.asarray), self._make_of_data),
            **{getattr(torch, name): refused(f"torch.{name}", _ON_ARRAYS) for name in _SPARSE},
            **dict.fromkeys(_LAYOUTS, self._read_layout),
            **dict.fromkeys(_READ_DTYPES, self._read_dtypes),
            **dict.fromkeys(_VERBS, _refuse_gradients),
            torch.randint_like: self._randint_like,
            **dict.fromkeys((torch.is_inference, tensor.is_inference), self._read_inference),
            tensor.requires_grad.__get__: self._read_requires_grad,
            tensor.is_leaf.__get__: self._read_is_leaf,
            tensor.grad_fn.__get__: self._read_grad_fn,
            tensor.requires_grad_: self._set_requires_grad,
            tensor.data.__get__: _data,
            tensor.data.__set__: _set_data,
            tensor.numpy: self._numpy,
            tensor.register_hook: _register_hook,
            after: refused(f"Tensor.{after.__name__}", _ON_HOOKS),
            tensor.backward: refused("Tensor.backward", "Return the loss, and call `backward` outside of the model"),
            torch.autograd.grad: self._take_gradients,
        }

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call `func`, or its handler for the code of others; see `torch.overrides`."""
        kwargs = kwargs or {}
        handler = self._handlers.get(func, self._make if kwargs.get("requires_grad") else None)
        if handler is None or own_room((asker := _asker(func)).f_code.co_filename):
            return func(*args, **kwargs)
        return handler(func, asker, *args, **kwargs)

    def _make(
        self, function: Any, asker: FrameType, *args: Any, requires_grad: bool = False, **kwargs: Any
    ) -> torch.Tensor:
        if not requires_grad:
            return function(*args, **kwargs)
        if not is_models_code(asker):
            return function(*args, requires_grad=True, **kwargs)
        return self._require_grad(function(*args, **kwargs), True)

    def _make_of_data(self, function: Any, asker: FrameType, data: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        if is_proxy(data):
            function = functools.partial(converted, copy=function is torch.tensor)
        return self._make(function, asker, data, *args, **kwargs)

    def _randint_like(self, function: Any, asker: FrameType, like: torch.Tensor, *args: Any, **kw: Any) -> torch.Tensor:
        # Torch's Python binding calls it below autograd, so no gradient flows through it.
        return self._make(function, asker, like.detach(), *args, **kw)

    def _require_grad(self, tensor: torch.Tensor, requires_grad: bool) -> torch.Tensor:
        self._effects.sets_requires_grad = True
        return torch.ops.aten.requires_grad_.default(tensor, requires_grad)

    def _set_requires_grad(self, function: Any, asker: FrameType, tensor: Any, requires_grad: bool = True) -> Any:
        # A detached tensor, as of a new parameter, requires none already; a backward prepares what it differentiates.
        is_off = not requires_grad and getattr(node_of(tensor), "target", None) is torch.ops.aten.detach.default
        if is_off or grad_mode.within_backward() or not is_models_code(asker):
            return function(tensor, requires_grad)
        return self._require_grad(tensor, requires_grad)

    def _read_layout(self, function: Any, asker: FrameType, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if _is_models_own(tensor, asker):
            self._effects.reads.add("layout")
        return function(tensor, *args, **kwargs)

    def _read_dtypes(self, function: Any, asker: FrameType, *args: Any, **kwargs: Any) -> Any:
        note_dtypes(self._effects, _READ_DTYPES[function](*args, **kwargs), asker)
        return self._make(function, asker, *args, **kwargs)

    def _read_inference(self, function: Any, asker: FrameType, tensor: torch.Tensor) -> bool:
        if _is_users(asker):
            self._effects.reads.add("inference_mode")
        return function(tensor)

    def _read_requires_grad(self, function: Any, asker: FrameType, tensor: torch.Tensor) -> bool:
        asks = _is_users(asker) and not within_subclass()
        return False if asks and not self._effects.questions.ask(tensor) else function(tensor)

    def _read_is_leaf(self, function: Any, asker: FrameType, tensor: torch.Tensor) -> bool:
        asks = _is_users(asker) and not within_subclass()
        if asks and not isinstance(tensor, nn.Parameter):
            self._effects.reads.add("is_leaf")
        return True if asks and not self._effects.questions.ask(tensor) else function(tensor)

    def _read_grad_fn(self, function: Any, asker: FrameType, tensor: torch.Tensor) -> Any:
        node = function(tensor)
        if not _is_models_own(tensor, asker):
            return node
        self._effects.reads.add("is_leaf")
        return _Node(node) if self._effects.questions.ask(tensor) and node is not None else None

    def _numpy(self, function: Any, asker: FrameType, tensor: torch.Tensor, *, force: bool = False) -> Any:
        if not isinstance(tensor, FakeTensor):
            return function(tensor, force=force)
        # Outside of the model's regions and of custom autograd functions, the trace has the call's own grad mode.
        recording = grad_mode.is_grad_enabled() and (grad_mode.within_region() or self._effects.grad)
        if tensor.requires_grad and recording and not force:
            raise ExportFailed(
                f"{user_line()}the model calls `Tensor.numpy` on a tensor that requires grad, which torch refuses. Use "
                "`tensor.detach().numpy()`, or leave out programs with gradients (`programs=('infer',)`)"
            )
        # A call whose tensor requires grad, unlike at capture, is refused when the array is returned.
        return ArrayProxy(tensor.detach().resolve_conj().resolve_neg() if force else tensor.view_as(tensor))

    def _take_gradients(self, function: Any, asker: FrameType, outputs: Any, inputs: Any, *args: Any, **kw: Any) -> Any:
        """Let the operators of a backward pass be traced; results are detached unless it makes a graph."""
        creates = kw.get("create_graph", False)
        self._effects.takes_gradients = True
        self._effects.reads |= {"identity", "inference_mode"}
        self._effects.differentiated += tree_leaves(inputs)
        # A backward takes gradients in a mode of their own.
        with torch.set_grad_enabled(creates) if grad_mode.within_backward() else contextlib.nullcontext():
            found = function(outputs, inputs, *args, **kw)
        return found if creates else tuple(None if each is None else each.detach() for each in found)


def _asker(function: Any) -> FrameType:
    """Return the frame of the code that calls a function, through other modes and the function's own body."""
    frame, body = sys._getframe(2), getattr(function, "__code__", None)
    while frame.f_back is not None and (_is_between(frame) or frame.f_code is body):
        frame = frame.f_back
    return frame


def _is_between(frame: FrameType) -> bool:
    code = frame.f_code
    is_mode = code.co_name == "__torch_function__" and not is_user_file(code.co_filename)
    return is_mode or code.co_filename == overrides.__file__


def _is_users(asker: FrameType) -> bool:
    return is_user_file(asker.f_code.co_filename)


def _is_models_own(tensor: torch.Tensor, asker: FrameType) -> bool:
    """Return whether the model's code reads a tensor; reads by code of a tensor subclass happen again in each call."""
    return _is_users(asker) and not isinstance(tensor, nn.Parameter) and not within_subclass()


def _data(function: Any, asker: FrameType, tensor: torch.Tensor) -> torch.Tensor:
    """Return the same memory; writes to it give `tensor` no new version."""
    return tensor.detach() if is_wrapper(tensor) else torch.ops.aten.data.default(tensor)


def _set_data(function: Any, asker: FrameType, tensor: torch.Tensor, new: torch.Tensor) -> None:
    """Give `tensor` the memory of `new`; it keeps its version."""
    if new.dtype is not tensor.dtype or new.device != tensor.device:
        refused("Tensor.data = ...` with another dtype or device, `", "Convert the model, or return the new tensor")()
    torch.ops.aten.set_data.default(tensor, new)


def _refuse_gradients(function: Any, asker: FrameType, tensor: torch.Tensor, *value: Any) -> Any:
    """Refuse the model's reads and changes of accumulated gradients: a trace has none, and its graph changes none."""
    verb = _VERBS[function]
    if is_models_code(asker) and (verb != "reads" or (tensor.requires_grad and tensor.is_leaf)):
        raise ExportFailed(
            f"{user_line()}the model {verb} `Tensor.grad`, the gradient that earlier passes left, which a bundle "
            "cannot hold. Do so outside of the model, or take gradients by `torch.autograd.grad`"
        )
    return function(tensor, *value)


def _register_hook(function: Any, asker: FrameType, tensor: torch.Tensor, hook: Callable[[torch.Tensor], Any]) -> Any:
    if not tensor.requires_grad or is_functionalised(tensor):
        return function(tensor, hook)
    if not traces_above_autograd():
        raise ExportFailed(
            f"{user_line()}the model calls `Tensor.register_hook`, which a bundle cannot hold beside function "
            f"transforms. {_ON_HOOKS}"
        )
    return record_hook(tensor, hook)


class _Node:
    """A node of autograd's graph, handed to the model; it refuses hooks, which a trace cannot record on nodes."""

    register_hook = refused("Node.register_hook", "Register hooks on tensors instead")
    register_prehook = refused("Node.register_prehook", "Register hooks on tensors instead")

    def __init__(self, node: Any) -> None:
        self._node = node

    def __getattr__(self, name: str) -> Any:
        return getattr(self._node, name)
