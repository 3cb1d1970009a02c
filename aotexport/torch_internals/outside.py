"""Leave the modes of a trace, and handle tensors from outside of it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch
from torch._guards import TracingContext
from torch.fx.experimental import proxy_tensor
from torch.fx.experimental.proxy_tensor import PythonKeyTracer
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack, _pop_mode, _push_mode
from torch.utils._python_dispatch import _disable_current_modes


@contextlib.contextmanager
def function_modes(keeps: Callable[[TorchFunctionMode], bool]) -> Iterator[None]:
    """Leave the current modes for functions in the block, but those that are kept."""
    modes = [_pop_mode() for _ in _get_current_function_mode_stack()][::-1]
    kept = list(filter(keeps, modes))
    for mode in kept:
        _push_mode(mode)
    try:
        yield
    finally:
        for _ in kept:
            _pop_mode()
        for mode in modes:
            _push_mode(mode)


@contextlib.contextmanager
def without_modes() -> Iterator[None]:
    """Run the block for real, outside of any trace."""
    with function_modes(lambda mode: False), _disable_current_modes():
        yield


def record_attribute(tracer: PythonKeyTracer, tensor: torch.Tensor, fake: torch.Tensor) -> None:
    """Record a tensor as an attribute of the graph, and that `fake` is its value."""
    name = tracer.get_fresh_qualname("_tensor_constant")
    setattr(tracer.root, name, tensor)
    proxy = tracer.create_proxy("get_attr", name, (), {})
    proxy_tensor.track_tensor_tree(fake, proxy, constant=None, tracer=tracer)


def set_version(tensor: torch.Tensor, version: int) -> None:
    """Set the version of a tensor, and of the views that share its version counter."""
    torch._C._autograd._unsafe_set_version_counter((tensor,), (version,))  # type: ignore[attr-defined]


@contextlib.contextmanager
def fresh_symbols_dropped() -> Iterator[None]:
    """Drop data-dependent numbers that the block made and that no value has, as from a trace that failed half way."""
    mode = getattr(TracingContext.try_get(), "fake_mode", None)
    environment = None if mode is None else mode.shape_env
    before = None if environment is None else list(environment.pending_fresh_unbacked_symbols)
    try:
        yield
    finally:
        if environment is not None:
            environment.pending_fresh_unbacked_symbols[:] = before
