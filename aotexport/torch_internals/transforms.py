"""Function transforms of a traced model: `torch.vmap`, `torch.func.grad`, forward-mode differentiation."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Iterator
from pathlib import Path

import torch
from torch._functorch import eager_transforms
from torch.autograd import forward_ad

from aotexport.torch_internals.names import TRANSFORMS


def load_forward_mode() -> None:
    """Compile torch's rules of forward-mode differentiation that are made of other operators.

    Torch does so at the first dual tensor, and cannot during a trace: it reads the source of functions that are
    patched.
    """
    with forward_ad.dual_level():
        forward_ad.make_dual(torch.zeros(()), torch.zeros(()))


def raised_in_transform(error: BaseException) -> bool:
    """Return whether an error was raised in a function transform (`torch.vmap`, `torch.func.grad`)."""
    files = [frame.f_code.co_filename for frame, _ in traceback.walk_tb(error.__traceback__)]
    return any("_functorch" in Path(file).parts and Path(file).stem in ("vmap", "eager_transforms") for file in files)


def has_transforms(graph: torch.fx.Graph) -> bool:
    """Return whether nodes of a graph enter or leave a function transform (`torch.vmap`, `torch.func.grad`)."""
    targets = (node.target for node in graph.nodes if node.op == "call_function")
    return any(getattr(target, "__module__", "").startswith("torch._functorch") for target in targets)


@contextlib.contextmanager
def transforms_left() -> Iterator[None]:
    """Leave the function transforms that the block entered and, by failing, did not leave."""
    depth = TRANSFORMS.get_dynamic_layer_stack_depth()
    level, nesting = forward_ad._current_level, eager_transforms.JVP_NESTING
    try:
        yield
    finally:
        TRANSFORMS.pop_dynamic_layer_stack_and_undo_to_depth(depth)
        forward_ad._current_level, eager_transforms.JVP_NESTING = level, nesting
        if level < 0:
            # Torch has at most one level; closing it fails unless it is open.
            with contextlib.suppress(RuntimeError):
                torch._C._exit_dual_level(level=0)
