"""Let traces follow tensors into wrapper subclasses and out of them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

# Constructors of tensor subclasses that torch marks, which record themselves during an export.
from torch._export import wrappers
from torch.fx.experimental import proxy_tensor
from torch.utils._pytree import tree_leaves

from aotexport.process.patches import Patch, patched
from aotexport_runtime.values.subclasses import inner_tensor, inner_tensors, is_wrapper, parts, with_inner


def is_wrap(target: Any) -> bool:
    """Return whether a node's target makes a tensor subclass of plain tensors; its `meta['val']` has the class."""
    return getattr(target, "_aotexport_wraps", False)


def _wrap_like(template: torch.Tensor) -> Callable[..., Any]:
    """Return a function that makes a tensor with the structure of `template` from plain tensors."""

    def made(like: torch.Tensor, inner: Iterator[torch.Tensor]) -> torch.Tensor:
        if not is_wrapper(like):
            return next(inner)
        return with_inner(like, lambda value: made(value, inner))

    def wrapped(inner: Sequence[torch.Tensor]) -> torch.Tensor:
        return made(template, iter(inner))

    wrapped._aotexport_wraps = True  # type: ignore[attr-defined]
    return wrapped


class _Within:
    depth = 0


def within_subclass() -> bool:
    """Return whether an operator on a tensor subclass is running; its code runs again in every call of the graph."""
    return _Within.depth > 0


def subclasses_tracked() -> contextlib.AbstractContextManager[None]:
    """Let a trace follow tensors into wrapper subclasses and out of them.

    Operators on a tensor subclass are recorded whole, and run by its own code at run time. The code of a model, or of
    the class above operators (`__torch_function__`), may read inner tensors, and make such tensors of others: both get
    nodes.
    """
    track, call = proxy_tensor.track_tensor, proxy_tensor.proxy_call

    def track_tensor(tensor: torch.Tensor, proxy: Any, *, constant: Any, tracer: Any) -> None:
        track(tensor, proxy, constant=constant, tracer=tracer)
        for name, inner in inner_tensors(tensor).items():
            reached = tracer.create_proxy("call_function", inner_tensor, (proxy, name), {})
            proxy_tensor.set_meta(reached, inner)
            track_tensor(inner, reached, constant=None, tracer=tracer)

    def proxy_call(mode: Any, func: Any, pre_dispatch: bool, args: Any, kwargs: Any) -> Any:
        leaves = [leaf for leaf in tree_leaves((args, kwargs)) if is_wrapper(leaf)]
        for leaf in leaves:
            adopt(leaf, mode.tracer)
        _Within.depth += bool(leaves)
        try:
            return call(mode, func, pre_dispatch, args, kwargs)
        finally:
            _Within.depth -= bool(leaves)

    reason = "Record the inner tensors of tensor subclasses, and subclasses made of tensors"
    unmarked = "Keep marked constructors from recording nodes of Python functions"
    return patched(
        Patch(proxy_tensor, "track_tensor", track_tensor, reason),
        Patch(proxy_tensor, "proxy_call", proxy_call, reason),
        Patch(wrappers, "_maybe_find_pre_dispatch_tf_mode_for_export", lambda: None, unmarked),
    )


def adopt(tensor: torch.Tensor, tracer: Any) -> None:
    """Give a node to a tensor subclass that the traced code made of other tensors."""
    if proxy_tensor.has_proxy_slot(tensor, tracer):
        return
    known = [proxy_tensor.get_proxy_slot(part, tracer, part, lambda slot: slot.proxy) for part in parts(tensor)]
    proxy = tracer.create_proxy("call_function", _wrap_like(tensor), (known,), {})
    proxy_tensor.set_meta(proxy, tensor)
    proxy_tensor.track_tensor(tensor, proxy, constant=None, tracer=tracer)
