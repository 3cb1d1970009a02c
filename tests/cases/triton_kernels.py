"""Triton kernels: in operators, with gradients of the same kind and what CPUs run in their place, and bare."""

import torch
import triton
import triton.language as tl
from torch import nn
from torch.library import triton_op, wrap_triton

NAMESPACE = "aotexport_triton"


@triton.jit
def scaling(source, target, count, factor, BLOCK: tl.constexpr):  # noqa: N803 (as Triton's kernels are written)
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = index < count
    tl.store(target + index, tl.load(source + index, mask=inside) * factor, mask=inside)


@triton.autotune(configs=[triton.Config({"BLOCK": 16}, num_warps=1), triton.Config({"BLOCK": 64})], key=["count"])
@triton.jit
def multiplying(left, right, target, count, factor, BLOCK: tl.constexpr):  # noqa: N803
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = index < count
    product = tl.load(left + index, mask=inside) * tl.load(right + index, mask=inside)
    tl.store(target + index, product * factor, mask=inside)


@triton_op(f"{NAMESPACE}::scaled", mutates_args={})
def scaled(x: torch.Tensor, factor: float) -> torch.Tensor:
    result = torch.empty_like(x)
    wrap_triton(scaling)[(triton.cdiv(x.numel(), 32), 1)](x, result, x.numel(), factor, BLOCK=32)
    return result


@triton_op(f"{NAMESPACE}::product", mutates_args={})
def product(left: torch.Tensor, right: torch.Tensor, factor: float) -> torch.Tensor:
    result = torch.empty_like(left)
    grid = lambda meta: (triton.cdiv(left.numel(), meta["BLOCK"]),)  # noqa: E731
    wrap_triton(multiplying)[grid](left, right, result, left.numel(), factor)
    return result


@scaled.register_kernel("cpu")
def _(x, factor):
    return x * factor


@torch.library.impl(product._qualname, "CPU")
def _(left, right, factor):
    return left * right * factor


def _keep(ctx, inputs, output):
    ctx.save_for_backward(*inputs[:-1])
    ctx.factor = inputs[-1]


scaled.register_autograd(lambda ctx, grad: (scaled(grad.contiguous(), ctx.factor), None), setup_context=_keep)


def _product_backward(ctx, grad):
    left, right = ctx.saved_tensors
    grad = grad.contiguous()
    return product(grad, right, ctx.factor), product(grad, left, ctx.factor), None


product.register_autograd(_product_backward, setup_context=_keep)


class OfTriton(nn.Module):
    """A layer between kernels, one with several configurations."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 7)

    def forward(self, x):
        hidden = self.linear(x)
        return product(scaled(hidden, 0.5), hidden.sin(), 2.0).tanh()


@triton.heuristics({"EVEN": lambda args: args["count"] % args["BLOCK"] == 0})
@triton.jit
def counting(source, total, count, BLOCK: tl.constexpr, EVEN: tl.constexpr):  # noqa: N803
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(source + index) if EVEN else tl.load(source + index, mask=index < count, other=0.0)
    tl.atomic_add(total, tl.sum(value))


class Launching(nn.Module):
    """Launches kernels itself: tuned ones, by heuristics, on a view, and on a buffer that it changes."""

    def __init__(self):
        super().__init__()
        self.register_buffer("total", torch.zeros(1))

    def forward(self, x):
        rest = x[1:]
        half, result = torch.empty_like(rest), torch.empty_like(rest)
        scaling[(triton.cdiv(rest.numel(), 32),)](rest, half, rest.numel(), 0.5, BLOCK=32)
        grid = lambda meta: (triton.cdiv(rest.numel(), meta["BLOCK"]),)  # noqa: E731
        multiplying[grid](half, rest, result, rest.numel(), 2.0)
        counting[(1,)](x[:2], self.total, 8, BLOCK=8)
        return result.cos()


class Computing(Launching):
    """The same in operators of torch."""

    def forward(self, x):
        self.total.add_(x[:2].sum())
        return (x[1:] * x[1:]).cos()
