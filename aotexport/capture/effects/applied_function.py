"""The node of a custom autograd function, and what it runs; and the gradients that its backward gets."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.autograd.function import FunctionCtx

from aotexport.errors import ExportFailed
from aotexport.process.patches import Patch, patched
from aotexport.torch_internals.tracing import UNCHECKED, annotate_values


class AppliedFunction(NamedTuple):
    """The scalar operands of a node of `apply_function`, in order; see `schemas/README.md`, `autograd_function`."""

    outputs: int
    saved: int
    dirty: list[int]
    nondifferentiable: list[int]
    materializes: bool
    once: bool


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
                # One subgraph per pattern of defined gradients: a binary number, the first gradient lowest.
                subgraph = backwards[sum(1 << place for place, grad in enumerate(tangents) if grad is not None)]
                gradients = [grad for grad in tangents if grad is not None]
            if subgraph is None:
                raise ExportFailed("a custom autograd function has no backward for these gradients")
            return tuple(torch.fx.Interpreter(subgraph).run(*gradients, *ctx.saved_tensors, *ctx.stashed, *additional))

    return list(Applied.apply(*operands))


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


def materialized(grads: Sequence[torch.Tensor | None], metas: Sequence[tuple[Any, ...]]) -> list[torch.Tensor]:
    """Return the gradients of outputs of the given shapes, dtypes and devices, with zeros for undefined ones.

    A trace has a gradient for every output that it uses, a call may have fewer; eager passes zeros for the others. So
    each gradient is a sum with zeros that are made of the others: if all tangents are undefined, so are the sums.
    """
    defined = [grad for grad in grads if grad is not None]
    found: list[torch.Tensor] = []
    for grad, (shape, dtype, device) in zip(grads, metas, strict=True):
        zeros = [other.new_zeros(shape, dtype=dtype, device=device) for other in defined if other is not grad]
        terms = zeros if grad is None else [grad, *zeros]
        found.append(sum(terms[1:], terms[0]) if terms else torch.zeros(shape, dtype=dtype, device=device))
    return found


def apply_materializing(
    apply: Callable[..., Any], function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, bool]:
    """Apply a custom function while a joint graph is traced; its backward gets materialized gradients.

    Returns:
        The results, and whether the backward takes some gradients of outputs without others.
    """
    differentiable: list[int] = []
    materializes = [True]
    name = "backward" if function.vjp is torch.autograd.Function.vjp else "vjp"
    own = getattr(function, name)

    def set_materialize_grads(ctx: Any, value: bool) -> None:
        materializes.append(value)
        _set_materialize_grads(ctx, value)

    def backward(ctx: Any, *grads: Any) -> Any:
        defined = [grads[place] for place in differentiable]
        if not materializes[-1] or any(grad is None for grad in defined):
            return own(ctx, *grads)
        found = materialized(defined, [(grad.shape, grad.dtype, grad.device) for grad in defined])
        filled = dict(zip(differentiable, found, strict=True))
        return own(ctx, *[filled.get(place, grad) for place, grad in enumerate(grads)])

    materializing = type(function.__name__, (function,), {name: staticmethod(backward)})
    reason = "Record whether a custom function takes undefined gradients"
    with patched(Patch(FunctionCtx, "set_materialize_grads", set_materialize_grads, reason)):
        results = apply(materializing, *args, **kwargs)
    outputs = results if isinstance(results, tuple) else (results,)
    differentiable += [
        place for place, output in enumerate(outputs) if isinstance(output, torch.Tensor) and output.requires_grad
    ]
    return results, not materializes[-1] and len(differentiable) > 1


_set_materialize_grads = FunctionCtx.set_materialize_grads
