"""Checkpoints (`torch.utils.checkpoint`): the trace runs what they surround, once, as it would run without them.

Memory is the partition's business. Gradients are the same, with two exceptions that eager has: a reentrant checkpoint
none of whose arguments requires grad records nothing; and what the surrounded part writes, eager writes once more when
it computes it anew in backward.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from aotexport.capture.sources import user_line
from aotexport.errors import ExportFailed
from aotexport.torch_internals.bodies import checkpoints


class Checkpoints:
    """Stand-ins for both kinds."""

    def __init__(self, module: nn.Module | None) -> None:
        """Watch the state of `module`; None: a function."""
        self._module = module

    def replacements(self) -> list[tuple[Any, str, Any]]:
        """Return what stands in for torch's functions, as `(module, name, attribute)`."""
        return [(checkpoints, "_checkpoint_without_reentrant_generator", self._around)]

    def reentrant(self, function: Callable[..., Any], preserve_rng_state: bool, *args: Any) -> Any:
        """Stand for the application of `CheckpointFunction`."""
        records = any(isinstance(arg, torch.Tensor) and arg.requires_grad for arg in args)
        if not records:
            with torch.no_grad():
                return function(*args)
        with self._unwritten(args):
            return function(*args)

    def _around(self, function: Any, preserve_rng_state: Any = True, *options: Any, **kwargs: Any) -> Iterator[None]:
        """Stand for the generator that surrounds a call without reentrance."""
        with self._unwritten(options):
            yield

    @contextlib.contextmanager
    def _unwritten(self, args: Any) -> Iterator[None]:
        """Refuse what writes to the state of the model, or to its arguments, while gradients are recorded."""
        tensors = {f"argument {index}": arg for index, arg in enumerate(args) if isinstance(arg, torch.Tensor)}
        if self._module is not None:
            tensors |= {**dict(self._module.named_parameters()), **dict(self._module.named_buffers())}
        before = {name: tensor._version for name, tensor in tensors.items()}
        yield
        for name, tensor in tensors.items():
            if tensor._version != before[name] and torch.is_grad_enabled():
                raise ExportFailed(
                    f"{user_line()}a checkpointed part of the model writes to `{name}`, and eager writes again when it "
                    "computes the part anew in backward, which a bundle does not. Take it out of the checkpoint"
                )
