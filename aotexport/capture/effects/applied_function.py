"""The node of a custom autograd function, and what it runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from aotexport.capture.effects.materialized import materialized
from aotexport.errors import ExportFailed
from aotexport.torch_internals.tracing import UNCHECKED, annotate_values


@dataclass(frozen=True)
class AppliedFunction:
    """The scalar fields of a node of `apply_function`; see `schemas/README.md`, `autograd_function`."""

    outputs: int
    saved: int
    dirty: list[int]
    nondifferentiable: list[int]
    materializes: bool
    once: bool

    def flat(self) -> tuple[Any, ...]:
        """Return the fields in the order of the node's operands."""
        return self.outputs, self.saved, self.dirty, self.nondifferentiable, self.materializes, self.once


def apply_function(
    forward: torch.fx.GraphModule,
    backwards: Sequence[torch.fx.GraphModule | None],
    operands: Sequence[torch.Tensor],
    additional: Sequence[Any],
    *fields: Any,
) -> list[torch.Tensor]:
    """Apply the autograd function of the subgraphs: the target of its nodes."""
    function = AppliedFunction(*fields)

    class Applied(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *tensors: torch.Tensor) -> tuple[Any, ...]:
            results = torch.fx.Interpreter(forward).run(*tensors, *additional)
            outputs, rest = results[: function.outputs], results[function.outputs :]
            ctx.mark_dirty(*[tensors[index] for index in function.dirty])
            ctx.mark_non_differentiable(*[outputs[index] for index in function.nondifferentiable])
            ctx.set_materialize_grads(False)
            ctx.metas = [(output.shape, output.dtype, output.device) for output in outputs]
            ctx.save_for_backward(*rest[: function.saved])
            ctx.stashed = rest[function.saved :]
            annotate_values([value for value in ctx.stashed if isinstance(value, torch.Tensor)], UNCHECKED)
            return tuple(outputs)

        @staticmethod
        def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[Any, ...]:
            subgraph = backwards[0]
            if function.materializes:
                gradients = materialized(grads, ctx.metas)
            else:
                tangents = [grad for i, grad in enumerate(grads) if i not in function.nondifferentiable]
                subgraph = backwards[_pattern_number([grad is not None for grad in tangents])]
                gradients = [grad for grad in tangents if grad is not None]
            if subgraph is None:
                raise ExportFailed("a custom autograd function has no backward for these gradients")
            return tuple(torch.fx.Interpreter(subgraph).run(*gradients, *ctx.saved_tensors, *ctx.stashed, *additional))

    return list(Applied.apply(*operands))


def _pattern_number(defined: Sequence[bool]) -> int:
    """Return the index of the subgraph for a pattern of defined gradients: a binary number, first gradient lowest."""
    return sum(1 << place for place, is_defined in enumerate(defined) if is_defined)


def function_of_subgraphs(
    forward: torch.fx.GraphModule, backward: torch.fx.GraphModule, described: dict[str, Any]
) -> type[torch.autograd.Function]:
    """Return a custom function made of the subgraphs that Dynamo split it into.

    Args:
        forward: returns outputs and saved values.
        backward: takes gradients and saved values.
        described: torch's further arguments of `autograd_function_apply`.
    """

    class Taken(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *args: Any) -> Any:
            outputs, ctx.values = torch.fx.Interpreter(forward).run(*args)
            results = outputs if isinstance(outputs, tuple | list) else (outputs,)
            ctx.mark_dirty(*[results[index] for index in described.get("dirty_idx", ())])
            ctx.mark_non_differentiable(*[results[index] for index in described["non_differentiable_idx"]])
            ctx.save_for_backward(*[ctx.values[index] for index in described["saved_for_backward_idx"]])
            return outputs if isinstance(outputs, torch.Tensor) else tuple(outputs)

        @staticmethod
        def backward(ctx: Any, *grads: torch.Tensor) -> Any:
            returned = torch.fx.Interpreter(backward).run(*grads, *ctx.values)
            return tuple(returned) if isinstance(returned, list) else returned

    return Taken
