"""Handle tensors that a trace meets from outside: pause its modes, record them in its graph, and set their versions."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch.fx.experimental import proxy_tensor
from torch.fx.experimental.proxy_tensor import PythonKeyTracer
from torch.utils._python_dispatch import _disable_current_modes


@contextlib.contextmanager
def without_modes() -> Iterator[None]:
    """Run the block for real, outside of any trace."""
    modes = [torch.overrides._pop_mode() for _ in torch.overrides._get_current_function_mode_stack()]
    try:
        with _disable_current_modes():
            yield
    finally:
        for mode in reversed(modes):
            torch.overrides._push_mode(mode)


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
    mode = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE)
    environment = None if mode is None else mode.shape_env
    before = None if environment is None else list(environment.pending_fresh_unbacked_symbols)
    try:
        yield
    finally:
        if environment is not None:
            environment.pending_fresh_unbacked_symbols[:] = before
