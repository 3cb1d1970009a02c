"""Training and evaluation mode of a module, and attributes of its parts, set for a while."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, Literal

from torch import nn

Attribute = tuple[nn.Module, str, Any]
"""A module, the name of an attribute of it, and a value."""


@contextlib.contextmanager
def in_mode(
    module: nn.Module | None, mode: Literal["train", "eval", "function"], attributes: Sequence[Attribute] = ()
) -> Iterator[None]:
    """Put `module` in `mode`, and every submodule back in its own mode afterwards.

    A module that is in this mode already is left alone: submodules that the user froze stay frozen.

    Args:
        module: the module; None: a function.
        mode: the mode.
        attributes: what else to set, and to put back.
    """
    if module is None:
        yield
        return
    before = [(child, "training", child.training) for child in module.modules()]
    before += [(child, name, getattr(child, name)) for child, name, _ in attributes]
    if module.training != (mode == "train"):
        # What `torch.export` makes has the one mode that it was made in, and says so.
        with contextlib.suppress(NotImplementedError):
            module.train(mode == "train")
    for child, name, value in attributes:
        setattr(child, name, value)
    try:
        yield
    finally:
        for child, name, value in before:
            setattr(child, name, value)
