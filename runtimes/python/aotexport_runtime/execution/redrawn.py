"""Subgraphs whose backward runs them once more, with new random numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from aotexport_runtime.errors import NotSupported
from aotexport_runtime.execution import transforms
from aotexport_runtime.execution.autocast import autocast_of_now

CompiledSubgraph = Callable[[list[Any], dict[str, int]], tuple[Any, ...]]


def redrawn(subgraph: CompiledSubgraph, operands: list[Any], symbols: dict[str, int]) -> tuple[Any, ...]:
    """Return the results of `subgraph`; their gradients are those of a second run, which draws anew.

    Every operand that requires grad gets a gradient, zeros where no result is computed from it.

    Args:
        subgraph: draws random numbers; it changes nothing but the random generator.
        operands: tensors and integers.
        symbols: value of each symbol.

    Raises:
        NotSupported: a function transform would have to look into it.

    Source: torch 2.13, `torch/_higher_order_ops/utils.py` (`create_bw_fn`), for `cond`, `while_loop` and `map`, whose
        backward does not keep the state of the generator.
    """
    if not torch.is_grad_enabled() or not any(isinstance(o, torch.Tensor) and o.requires_grad for o in operands):
        return subgraph(list(operands), symbols)
    if transforms.active():
        raise NotSupported(
            "this call is inside of torch.func or forward-mode AD, and a branch or loop of the model draws random "
            "numbers on the way to gradients. Use torch.autograd outside of them"
        )
    return _Redrawn.apply(subgraph, symbols, *operands)


class _Redrawn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, subgraph: CompiledSubgraph, symbols: dict[str, int], *operands: Any) -> tuple[Any, ...]:
        device = next(operand.device for operand in operands if isinstance(operand, torch.Tensor))
        ctx.subgraph, ctx.symbols, ctx.casts = subgraph, symbols, autocast_of_now(device.type)
        ctx.others = [None if isinstance(operand, torch.Tensor) else operand for operand in operands]
        ctx.save_for_backward(*[operand if isinstance(operand, torch.Tensor) else None for operand in operands])
        return subgraph(list(operands), symbols)

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride] (the decorator's type)
        ctx: Any, *grads: torch.Tensor
    ) -> tuple[Any, ...]:
        tracked = [tensor is not None and tensor.requires_grad for tensor in ctx.saved_tensors]
        operands = [
            other if tensor is None else tensor.detach().requires_grad_(is_tracked)
            for tensor, other, is_tracked in zip(ctx.saved_tensors, ctx.others, tracked, strict=True)
        ]
        with torch.enable_grad(), ctx.casts():
            results = ctx.subgraph(list(operands), ctx.symbols)
        roots = [(r, g) for r, g in zip(results, grads, strict=True) if isinstance(r, torch.Tensor) and r.requires_grad]
        inputs = [operand for operand, is_tracked in zip(operands, tracked, strict=True) if is_tracked]
        found = iter(torch.autograd.grad([r for r, _ in roots], inputs, [g for _, g in roots], materialize_grads=True))
        return (None, None, *[next(found) if is_tracked else None for is_tracked in tracked])
