"""Whether a function transform of `torch.func` is active: the one private name of torch that the runtime uses.

An `autograd.Function` cannot be differentiated or batched by `torch.func` from inside, so calls under a transform run
the forward graph. torch has no public way to ask; without the private one, no transform is assumed and torch raises.
"""

from __future__ import annotations

import torch

_functorch = getattr(torch._C, "_functorch", None)  # noqa: TID251 (see above) # pyright: ignore[reportPrivateUsage]
_peek = getattr(_functorch, "peek_interpreter_stack", None)


def active() -> bool:
    """Return whether `torch.func.grad`, `vmap`, `jvp` or the like surrounds this call."""
    return _peek is not None and _peek() is not None
