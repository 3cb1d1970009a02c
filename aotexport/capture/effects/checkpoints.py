"""Checkpoints (`torch.utils.checkpoint`): nodes that begin and end them in forward graphs.

A runtime recomputes the values between them in backward. Gradients are as without a checkpoint, but eager repeats its
writes, and records nothing in a reentrant one without such arguments.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from aotexport.errors import ExportFailed
from aotexport.model.source_lines import user_line
from aotexport.process.patches import Patch
from aotexport.torch_internals.releases import release
from aotexport.torch_internals.subgraphs import checkpoints
from aotexport.torch_internals.tracing import current_tracer, is_functionalised, record_mark


def enter_checkpoint(arguments: Sequence[torch.Tensor], repeats_draws: bool) -> None:
    """Begin a checkpointed part of these arguments: the target of nodes.

    Args:
        arguments: tensors.
        repeats_draws: whether backward draws the random numbers of the call again.
    """


def exit_checkpoint(entered: None) -> None:
    """End the part that `entered` began: the target of nodes."""


class Checkpoints:
    """Patches of both kinds of checkpoints, reentrant or not."""

    def __init__(self, module: nn.Module | None) -> None:
        """Watch the state of `module`; None: a function."""
        self._module = module
        self._inside = False

    def patches(self) -> list[Patch]:
        """Return patches that mark checkpointed parts in the trace."""
        name = release().checkpoint_generator
        signature = inspect.signature(getattr(checkpoints, name))

        def around(*args: Any, **kwargs: Any) -> Iterator[None]:
            call = signature.bind(*args, **kwargs)
            call.apply_defaults()
            inputs: Sequence[Any] = call.arguments["args"]
            named: Mapping[str, Any] = call.arguments["kwargs"]
            with (
                self._unwritten((*inputs, *named.values())),
                self._marked(inputs, call.arguments["preserve_rng_state"]),
            ):
                yield

        return [Patch(checkpoints, name, around, "Mark the nodes of checkpointed parts")]

    def reentrant(self, function: Callable[..., Any], preserve_rng_state: bool, *args: Any, records: bool) -> Any:
        """Replace the application of `CheckpointFunction`; `records`: whether one of `args` requires grad."""
        if not records:
            with torch.no_grad():
                return function(*args)
        with self._unwritten(args), self._marked(args, preserve_rng_state):
            return function(*args)

    @contextlib.contextmanager
    def _marked(self, args: Sequence[Any], preserves: bool) -> Iterator[None]:
        """Mark a part in the trace; a nested part belongs to the outer one."""
        tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]
        is_functional = any(map(is_functionalised, tensors))
        if self._inside or not torch.is_grad_enabled() or current_tracer() is None or is_functional:
            yield
            return
        begin = record_mark(enter_checkpoint, tensors, preserves)
        self._inside = True
        try:
            yield
        finally:
            self._inside = False
        record_mark(exit_checkpoint, begin)

    @contextlib.contextmanager
    def _unwritten(self, args: Any) -> Iterator[None]:
        """Refuse writes to the state of the model, or to the arguments, while gradients are recorded."""
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
