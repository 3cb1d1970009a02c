"""Zeros for the gradients of those outputs of a custom function that a backward pass does not come from.

A trace has a gradient for every output that it uses; a call may have fewer. Where any gradient is defined, eager passes
zeros for the others. So each gradient is a sum with zeros that are made of the others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd.function import FunctionCtx

from aotexport.process.patches import Patch, patched


def materialized(grads: Sequence[torch.Tensor | None], metas: Sequence[tuple[Any, ...]]) -> list[torch.Tensor]:
    """Return the gradients, with zeros in place of undefined ones.

    When some tangents of a joint graph are undefined, the sums leave zeros; when all are, they leave nothing.

    Args:
        grads: one per output.
        metas: shape, dtype and device of each output.
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

    Args:
        apply: `torch.autograd.Function.apply`, with the class as the first argument.
        function: the user's class.
        args: arguments of its `apply`.
        kwargs: keyword arguments of its `apply`.

    Returns:
        The results, and whether the backward takes some gradients of outputs without others.
    """
    if getattr(function, "boxed_grads_call", False):
        return apply(function, *args, **kwargs), True
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
