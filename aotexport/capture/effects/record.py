"""Record, note or refuse effects of the model that tracing would lose."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch.fx import Node

from aotexport.capture.effects.applied_function import apply_materializing
from aotexport.capture.effects.autograd_functions import record_application
from aotexport.capture.effects.checkpoints import Checkpoints
from aotexport.capture.effects.grad_mode import traced_as
from aotexport.capture.effects.questions import Questions, codes_of_function
from aotexport.errors import ExportFailed
from aotexport.model.refusals import attempt
from aotexport.model.source_lines import described
from aotexport.torch_internals.subclasses import within_subclass
from aotexport.torch_internals.subgraphs import CheckpointFunction
from aotexport.torch_internals.tracing import current_tracer, traces_above_autograd

Read = Literal["layout", "requires_grad", "is_leaf", "grad_mode", "inference_mode", "identity", "autocast"]
"""Facts beside values that Python code, or torch on its behalf, depends on; see `Program.fixed`."""


@dataclass
class Effects:
    """Effects seen while the model ran.

    Attributes:
        above_autograd: whether the trace sees autograd's work, see `trace_forward`.
        autograd_functions: names of custom autograd functions whose backward the forward graph lacks.
        takes_some_gradients: whether the backward of one of these takes some gradients of its outputs without others.
        sets_requires_grad: whether the model calls `requires_grad_`, which functional graphs cannot hold.
        reads: facts that Python code read, see `Program.fixed`.
        asks_autocast: whether Python code asked for autocast or its dtype.
        dtypes_read: nodes of the values whose dtypes Python code read, in the trace; None: of a value outside of it.
        stored: paths of attributes in which the call stores something, perhaps for later calls.
        notes: sentences for the user about effects that the bundle does not reproduce.
    """

    above_autograd: bool = True
    autograd_functions: list[str] = field(default_factory=list)
    takes_some_gradients: bool = False
    takes_gradients: bool = False
    differentiated: list[Any] = field(default_factory=list)
    sets_requires_grad: bool = False
    grad: bool = True
    reads: set[Read] = field(default_factory=set[Read])
    questions: Questions = field(default_factory=Questions)
    asks_autocast: bool = False
    dtypes_read: set[Node | None] = field(default_factory=set[Node | None])
    stored: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    checkpoints: Checkpoints = field(default_factory=lambda: Checkpoints(None))

    def applied(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], apply: Any) -> Any:
        """Apply a custom autograd function, recording it with its backward where possible."""
        if function is CheckpointFunction:
            return self.checkpoints.reentrant(*args, records=self.questions.ask_for_gradients(args))
        # Higher-order and custom operators apply functions of their own; the node holds the whole operator.
        # Functions applied while the trace is paused belong to the node recorded for the pause.
        owners = ("torch._higher_order_ops", "torch._dynamo", "torch._library", "aotexport.")
        if function.__module__.startswith(owners) or current_tracer() is None:
            return apply(function, *args, **kwargs)
        reason = "a function transform surrounds it"
        if within_subclass():
            reason = "a tensor subclass applies it"
        elif traces_above_autograd():
            try:
                with attempt("custom autograd function"):
                    return record_application(function, args, kwargs)
            except ExportFailed as refusal:
                reason = described(refusal.error)
        if not self.grad:
            # What it computes may depend on it (`ctx.needs_input_grad`).
            args = tuple(self.questions.as_in_eager(arg) for arg in args)
        if self.grad or any(isinstance(arg, torch.Tensor) and arg.requires_grad for arg in args):
            self.lost(function.__qualname__, reason)
        if any("needs_input_grad" in code.co_names for code in codes_of_function(function)):
            for arg in filter(torch.is_tensor, args):
                self.questions.ask_for_gradients([arg])
        with traced_as(function=object()):
            results, takes_some = apply_materializing(apply, function, args, kwargs)
        self.takes_some_gradients |= takes_some
        return results

    def lost(self, name: str, reason: str) -> None:
        """Note that the forward graph lacks the backward of a custom autograd function."""
        if name not in self.autograd_functions:
            self.autograd_functions.append(name)
            self.notes.append(
                f"the backward of the custom autograd function `{name}` is in joint graphs alone: {reason}"
            )
