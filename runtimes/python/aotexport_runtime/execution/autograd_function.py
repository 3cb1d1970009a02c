"""Custom autograd functions of a model, whose forward and backward are subgraphs, as functions of `torch.autograd`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from aotexport_runtime.errors import NotSupported
from aotexport_runtime.execution import transforms

Step = Callable[..., tuple[Any, ...]]


@dataclass(frozen=True)
class AutogradFunction:
    """A function; fields are further operands of `higher_order::autograd_function`, see `schemas/README.md`."""

    forward: Step
    backwards: Sequence[Step | None]
    additional: Sequence[Any]
    outputs: int
    saved: int
    dirty: Sequence[int]
    nondifferentiable: Sequence[int]
    materializes: bool
    once: bool

    def apply(self, operands: Sequence[Any]) -> Sequence[Any]:
        """Return its outputs for `operands`; a function transform cannot look into it (`NotSupported`)."""
        if not transforms.active():
            return (_AppliedOnce if self.once else _Applied).apply(self, *operands)
        if torch.is_grad_enabled() or transforms.forward_mode():
            raise NotSupported(
                "this call is inside of torch.func or forward-mode AD, and the model has custom autograd functions, "
                "which a bundle holds without their rules for these. Use torch.autograd outside of them"
            )
        return self.forward(*operands, *self.additional)[: self.outputs]


class _Applied(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, application: AutogradFunction, *operands: Any) -> tuple[Any, ...]:
        results = application.forward(*operands, *application.additional)
        saved_end = application.outputs + application.saved
        outputs = results[: application.outputs]
        ctx.application = application
        ctx.mark_dirty(*[operands[index] for index in application.dirty])
        ctx.mark_non_differentiable(*[outputs[index] for index in application.nondifferentiable])
        ctx.set_materialize_grads(application.materializes)
        ctx.save_for_backward(*results[application.outputs : saved_end])
        ctx.stashed = results[saved_end:]
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[Any, ...]:
        application: AutogradFunction = ctx.application
        subgraph, gradients = application.backwards[0], list(grads)
        if not application.materializes:
            skipped = set(application.nondifferentiable)
            tangents = [grad for index, grad in enumerate(grads) if index not in skipped]
            subgraph = application.backwards[sum(1 << place for place, grad in enumerate(tangents) if grad is not None)]
            gradients = [grad for grad in tangents if grad is not None]
        if subgraph is None:
            raise NotSupported(
                "the bundle has no backward of the model's custom autograd function for this call: it failed at export "
                "for gradients that are undefined as here, or this derivative is of too high an order"
            )
        return (None, *subgraph(*gradients, *ctx.saved_tensors, *ctx.stashed, *application.additional))


class _AppliedOnce(_Applied):
    backward: Any = staticmethod(once_differentiable(_Applied.backward))
