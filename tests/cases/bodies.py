"""Higher-order operators: branches, loops, scans, maps, checkpoints, autocast."""

import torch
from torch import nn
from torch._higher_order_ops.associative_scan import associative_scan
from torch._higher_order_ops.map import map as map_over
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop
from torch.autograd import forward_ad
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.utils.checkpoint import checkpoint

from tests.cases import case, slow_case
from tests.cases.mutations import leaf


@slow_case(lambda: (leaf(3, 4),))
def branches(x):
    return torch.cond(x.sum() > 0, lambda x: x.sin() * 2, lambda x: x.cos(), (x,))


@case(lambda: (leaf(3, 4),))
def loop_with_grad(x):
    return while_loop(lambda i, x: i < 3, lambda i, x: (i + 1, x.sin()), (torch.tensor(0), x))


@case(lambda: (leaf(5, 4), leaf(4)))
def map_over_rows(x, y):
    return map_over(lambda row, y: (row * y).sin(), x, y)


@slow_case(lambda: (leaf(5, 4),))
def associative_product(x):
    return associative_scan(lambda a, b: a * b, x, 0, combine_mode="generic")


CHECKPOINT = "the model recomputes checkpointed parts"


@case(lambda: (leaf(3, 4), leaf(4, 4)), forward_only=CHECKPOINT)
def checkpointed(x, w):
    return checkpoint(lambda x: (x @ w).sin().exp(), x, use_reentrant=False) * 2


@slow_case(lambda: (leaf(3, 4), leaf(4, 4)))
def autocast_within_a_branch(x, w):
    def narrow(x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return x @ w

    return torch.cond(x.sum() > 0, narrow, lambda x: (x @ w).bfloat16(), (x,))


def wave(x):
    return x.sin() * x.exp()


@case(lambda: (torch.randn(4),))
def hessian_inside(x):
    return torch.func.hessian(lambda x: wave(x).sum())(x)


@slow_case(lambda: (torch.randn(3, 4), leaf(3, 4)))
def linearized(x, t):
    y, tangents_of = torch.func.linearize(wave, x)
    return y, tangents_of(t) * tangents_of(t + 1)


class WithRuleForward(torch.autograd.Function):
    """Neither rule is the derivative, so that a lost one shows."""

    @staticmethod
    def forward(x):
        return x**3

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.saved_tensors[0] * 5

    @staticmethod
    def jvp(ctx, tangent):
        return tangent * ctx.saved_tensors[0] * 7


@case(lambda: (leaf(3, 4), leaf(3, 4)))
def dual_numbers(x, t):
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, t)
        with torch.no_grad():
            scale = dual.exp()
        result = forward_ad.unpack_dual(WithRuleForward.apply(dual) * scale)
        none = forward_ad.unpack_dual(x * 2).tangent
    return result, none


@case(lambda: (torch.randint(-5, 5, (3, 4), dtype=torch.int8), torch.randint(-5, 5, (4, 3), dtype=torch.int8)))
def product_in_another_dtype(x, y):
    return torch.ops.higher_order.out_dtype(torch.ops.aten.mm.default, torch.int32, x, y)


@case(lambda: (leaf(3, 4), leaf(4)))
def region_without_gradients_as_operator(x, w):
    fixed = torch.ops.higher_order.wrap_with_set_grad_enabled(False, lambda x: x * w, x)
    return fixed + x


@slow_case(lambda: (torch.randn(5, 4),), dynamic_shapes=({0: torch.export.Dim("rows", min=2)},))
class StepsOverParameters(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("scale", torch.randn(4))

    def forward(self, x):
        def step(carried, row):
            return self.linear(carried) * self.scale + row, carried.sum()

        return scan(step, torch.zeros(4), x)


@slow_case(lambda: (torch.randn(3, 4),), members=lambda: {"linear": nn.Linear(4, 4)})
def branches_within_branches(self, x):
    def inner(x):
        return torch.cond(x.sum() > 1, lambda x: self.linear(x) * x.shape[0], lambda x: x * 2, (x,))

    return torch.cond(x.mean() > 0, inner, lambda x: self.linear(x).cos(), (x,))


@slow_case(
    lambda: tuple(torch.randn(1, 2, 8, 4) for _ in range(3)), members=lambda: {"slopes": nn.Parameter(torch.randn(2))}
)
def attention_with_scores(self, query, key, value):
    mask = create_block_mask(lambda b, h, q, k: q >= k, None, None, query.shape[2], key.shape[2], device="cpu")

    def scores(score, b, h, q, k):
        return score + self.slopes[h] * (q - k)

    return flex_attention(query, key, value, score_mod=scores, block_mask=mask)


@case(lambda: (leaf(3, 4),), forward_only=CHECKPOINT)
class CheckpointsThatDrop(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.dropout = nn.Dropout(0.3)

    def inner(self, x):
        return self.dropout(self.linear(x).relu())

    def forward(self, x):
        return checkpoint(self.inner, x, use_reentrant=False) + checkpoint(self.inner, x, use_reentrant=True)


@case(lambda: (torch.randn(3, 4), leaf(4, 4)))
def reentrant_checkpoint_of_what_needs_no_gradient(x, w):
    return checkpoint(lambda x: x @ w, x, use_reentrant=True) + w.sum()
