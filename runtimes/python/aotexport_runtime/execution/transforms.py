"""Whether a function transform or forward-mode AD is active: the one place of the runtime with private names of torch.

They do not look into an `autograd.Function`, so such calls run the forward graph. torch has no public functions to ask;
if the private ones are missing, no transform is assumed, and torch raises.
"""

from __future__ import annotations

import torch
from torch.autograd import forward_ad

_functorch = getattr(torch._C, "_functorch", None)  # noqa: TID251 (see above)
_is_batched = getattr(_functorch, "is_legacy_batchedtensor", None)
_is_dead = getattr(_functorch, "is_dead_tensor_wrapper", None)
# What `torch.jit.is_tracing` asks, in two frames less.
_is_tracing = getattr(torch._C, "_is_tracing", None) or torch.jit.is_tracing  # noqa: TID251 (see above)
_peek = getattr(_functorch, "peek_interpreter_stack", None)
_autograd = getattr(torch._C, "_autograd", None)  # noqa: TID251 (see above)
_hooks_of_saved_tensors = getattr(_autograd, "_top_saved_tensors_default_hooks", None)


def active() -> bool:
    """Return whether `torch.func.grad`, `vmap`, `jvp`, a dual level, `torch.jit.trace` or the like surrounds a call."""
    return (_peek is not None and _peek() is not None) or forward_mode() or _is_tracing()


def forward_mode() -> bool:
    """Return whether derivatives are computed forwards: by a dual level, `torch.func.jvp` or `jacfwd`."""
    return getattr(forward_ad, "_current_level", -1) >= 0


def batched(tensor: torch.Tensor) -> bool:
    """Return whether `tensor` is a batch of gradients (`is_grads_batched`)."""
    return _is_batched is not None and bool(_is_batched(tensor))


def may_be_dead(tensor: torch.Tensor) -> bool:
    """Return whether `tensor` may be a wrapper that a function transform left behind."""
    return _is_dead is None or bool(_is_dead(tensor))


def checkpointed() -> bool:
    """Return whether a checkpoint that does not enter autograd again surrounds a call: it ends the second run early.

    Source: torch 2.13, `utils/checkpoint.py`, whose hooks take what autograd saves.
    """
    hooks = None if _hooks_of_saved_tensors is None else _hooks_of_saved_tensors(True)
    return hooks is not None and getattr(hooks[0], "__module__", "") == "torch.utils.checkpoint"
