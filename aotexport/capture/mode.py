"""Training and evaluation mode of a module, set for a while."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Literal

from torch import nn


@contextlib.contextmanager
def in_mode(module: nn.Module | None, mode: Literal["train", "eval", "function"]) -> Iterator[None]:
    """Put `module` in `mode`, and every submodule back in its own mode afterwards.

    A module that is in this mode already is left alone: submodules that the user froze stay frozen.
    """
    if module is None:
        yield
        return
    before = [(child, child.training) for child in module.modules()]
    if module.training != (mode == "train"):
        # What `torch.export` makes has the one mode that it was made in, and says so.
        with contextlib.suppress(NotImplementedError):
            module.train(mode == "train")
    try:
        yield
    finally:
        for child, training in before:
            child.training = training
