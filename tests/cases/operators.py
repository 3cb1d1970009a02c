"""Custom operators: with gradients of their own, that write to arguments, of lists, numbers, strings and None."""

from collections.abc import Sequence

import torch
from torch import nn

from tests.cases import case, slow_case
from tests.cases.mutations import leaf

NAMESPACE = "aotexport_cases"


@torch.library.custom_op(f"{NAMESPACE}::cubed", mutates_args=())
def cubed(x: torch.Tensor) -> torch.Tensor:
    return x**3


@cubed.register_fake
def _(x):
    return torch.empty_like(x)


def _save(ctx, inputs, output):
    ctx.save_for_backward(inputs[0])


# Not the derivative, so that a lost one shows.
cubed.register_autograd(lambda ctx, grad: grad * ctx.saved_tensors[0] * 5, setup_context=_save)
cubed.register_vmap(lambda info, dims, x: (cubed(x), dims[0]))


@slow_case(lambda: (leaf(3, 4),), keep_operators=[NAMESPACE])
def operator_with_gradients(x):
    return cubed(x).sin()


@torch.library.custom_op(f"{NAMESPACE}::described", mutates_args=())
def described(
    x: torch.Tensor,
    others: Sequence[torch.Tensor],
    bias: torch.Tensor | None,
    sizes: Sequence[int],
    mode: str = "sum",
    scale: float = 1.5,
    dtype: torch.dtype | None = None,
    flag: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    total = x * scale if mode == "scaled" else x.clone()
    for other in others:
        total = total + other
    total = total if bias is None else total - bias
    return total.to(dtype or x.dtype), torch.full(tuple(sizes), float(flag))


@described.register_fake
def _(x, others, bias, sizes, mode="sum", scale=1.5, dtype=None, flag=False):
    return torch.empty_like(x, dtype=dtype or x.dtype), x.new_empty(tuple(sizes))


@slow_case(
    lambda: (torch.randn(3, 4), torch.randn(3, 4)),
    dynamic_shapes=({0: torch.export.Dim("n")},) * 2,
    keep_operators=[NAMESPACE],
)
def operator_with_arguments_of_every_kind(x, y):
    first = described(x, [x, y], None, [x.shape[0], 2], "scaled", dtype=torch.float64, flag=True)
    second = described(y, [], x, [3], scale=0.5)
    return first, second


@torch.library.custom_op(f"{NAMESPACE}::split_rows", mutates_args=())
def split_rows(x: torch.Tensor) -> list[torch.Tensor]:
    return [row.clone() for row in x]


@split_rows.register_fake
def _(x):
    return [torch.empty_like(row) for row in x]


@slow_case(lambda: (torch.randn(3, 4),), keep_operators=[NAMESPACE])
def operator_that_returns_a_list(x):
    return sum(row * index for index, row in enumerate(split_rows(x.sin())))


@torch.library.custom_op(f"{NAMESPACE}::scale_", mutates_args={"x"})
def scale_(x: torch.Tensor, y: torch.Tensor) -> None:
    x.mul_(y)


@torch.library.custom_op(f"{NAMESPACE}::add_all_", mutates_args={"xs"})
def add_all_(xs: Sequence[torch.Tensor], y: torch.Tensor | None, count: int = 2) -> torch.Tensor:
    for x in xs:
        x.add_(count if y is None else y)
    return xs[0] * count


@add_all_.register_fake
def _(xs, y, count=2):
    return torch.empty_like(xs[0])


@case(lambda: (torch.randn(3, 4), torch.randn(3, 4)), keep_operators=[NAMESPACE])
def operator_that_writes_to_an_input(x, y):
    scale_(x, y)
    return x * 2


@slow_case(
    lambda: (torch.randn(3, 4), torch.randn(4)),
    dynamic_shapes=({0: torch.export.Dim("n")}, None),
    keep_operators=[NAMESPACE],
)
def operator_that_writes_to_views_and_lists(x, y):
    z, w = x.sin(), x.cos()
    scale_(z[0], y)
    first = add_all_([z, w], y)
    second = add_all_([w.t()[1:], z[1:]], None, 3)
    return z + w, first, second


@slow_case(lambda: (torch.randn(3, 4),), keep_operators=[NAMESPACE])
class OperatorThatWritesToABuffer(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("scale", torch.randn(4))

    def forward(self, x):
        with torch.no_grad():
            scale_(self.scale, x.mean(0))
        return self.linear(x) * self.scale


class _Scaled(torch.autograd.Function):
    """Writes in its forward, and in its backward twice, as kernels that accumulate do."""

    @staticmethod
    def forward(ctx, x, y):
        ctx.save_for_backward(y)
        out = x.clone()
        scale_(out, y)
        return out

    @staticmethod
    def backward(ctx, grad):
        (y,) = ctx.saved_tensors
        x_grad = grad.clone()
        scale_(x_grad, y)
        scale_(x_grad, y)
        return x_grad, None


@slow_case(lambda: (leaf(3, 4), torch.randn(3, 4)), keep_operators=[NAMESPACE])
def operator_that_writes_in_a_backward(x, y):
    return _Scaled.apply(x, y).sin()


@case(lambda: (leaf(3, 6, 8, 2), torch.rand(10) + 0.5))
def waves_of_spectrograms(x, window):
    return torch.istft(torch.view_as_complex(x), n_fft=10, window=window)
