"""Tensors of wrapper subclasses: as arguments, state, results and gradients."""

import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

from tests.cases import case, slow_case
from tests.scaled import Block, FastInt8, Recipe, Rounding, ScaledInt8

WHOLE = "results that are tensor subclasses"


def two(*shape, requires_grad=False):
    return TwoTensor(torch.randn(shape), torch.randn(shape)).requires_grad_(requires_grad)


def nested(*shape):
    return TwoTensor(two(*shape), two(*shape))


@slow_case(lambda: (two(3, 4, requires_grad=True), torch.randn(4, requires_grad=True)), forward_only=WHOLE)
def subclass_with_gradients(x, y):
    return (x * x).sum(0), torch.tanh(x * 2)


@case(lambda: (nested(3, 4).requires_grad_(), two(3, 4)), forward_only=WHOLE)
def nested_subclass(x, y):
    return torch.sin(x) * 2, y + 1


@slow_case(lambda: (two(3, 4), two(4)), forward_only=WHOLE)
def mutated_subclass(x, y):
    x.add_(y)
    y.t_() if y.dim() > 1 else y.mul_(2)
    return x * 2


@slow_case(lambda: (two(3, 4, requires_grad=True),), forward_only=WHOLE)
def subclass_itself_and_its_views(x):
    return x, x.t(), x.view(12), (x * 2)[1:]


@case(lambda: (two(3, 4), two(3, 4)))
def parts_of_a_subclass(x, y):
    return x.a * 2 + y.b, (x + y).a


@case(lambda: (torch.randn(3), torch.randn(3)), forward_only=WHOLE)
def subclass_made_of_arguments(x, y):
    made = TwoTensor(x * 2, y + 1)
    return made.sin(), made


@slow_case(lambda: (two(3, 4), torch.randn(2)), forward_only=WHOLE)
class SubclassWeight(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 2)
        self.linear.weight = nn.Parameter(two(2, 4))
        self.register_buffer("count", two(2))

    def forward(self, x, y):
        self.count.add_(1)
        return torch.tanh(self.linear(x)) + y


@slow_case(lambda: (torch.randn(3, 4, requires_grad=True),))
class ScaledInt8Weight(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 6)
        self.linear.weight = nn.Parameter(ScaledInt8.of(torch.randn(6, 4)), requires_grad=False)
        self.head = nn.Linear(6, 2)

    def forward(self, x):
        return self.head(self.linear(x).relu())


@slow_case(lambda: (torch.randn(3, 4, requires_grad=True),))
class FastInt8Weight(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 6)
        weight = FastInt8.of(torch.randn(6, 4), Recipe(Rounding.DOWN, Block(1, 4)))
        self.linear.weight = nn.Parameter(weight, requires_grad=False)

    def forward(self, x):
        return self.linear(x).relu() + self.linear.weight.sum()


class Scaled(torch.autograd.Function):
    """A product with a gradient that no operator has."""

    @staticmethod
    def forward(ctx, x, y, factor):
        ctx.save_for_backward(x, y)
        ctx.factor = factor
        return x * y * factor, y + 1

    @staticmethod
    def backward(ctx, grad, other):
        x, y = ctx.saved_tensors
        return grad * y * ctx.factor, grad * x * 5 + other, None


@slow_case(lambda: (two(3, 4, requires_grad=True), torch.randn(3, 4, requires_grad=True)), forward_only=WHOLE)
def custom_function_of_subclasses(x, y):
    product, other = Scaled.apply(x.sin(), x + y, 3.0)
    return product * 2, other


class Weight(nn.Parameter):
    """A parameter that knows something beside its values."""

    def __new__(cls, data, scale):
        made = super().__new__(cls, data)
        made.scale = scale
        return made


@case(lambda: (torch.randn(2, 4),))
class ParameterOfAClass(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = Weight(torch.randn(4, 3), 2.5)
        self.shift = nn.Buffer(torch.ones(3))
        self.shift.kind = "added"

    def forward(self, x):
        scale = self.weight.scale if isinstance(self.weight, Weight) else 0
        is_added = isinstance(self.shift, nn.Buffer) and self.shift.kind == "added"
        return x @ self.weight * scale + (self.shift if is_added else 0)


TYPES = (TwoTensor, ScaledInt8, FastInt8, Recipe, Rounding, Block)
