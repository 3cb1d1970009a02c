"""Outputs and inputs that share memory."""

import torch
from torch import nn

from tests.cases import case, slow_case
from tests.cases.mutations import leaf, non_leaf


@slow_case(lambda: (leaf(3, 4),))
def views_of_the_input(x):
    return x.view(-1), x.t(), x[0], x.unsqueeze(0), x.narrow(1, 1, 2)


@slow_case(lambda: (leaf(6, 4),))
def several_views_at_once(x):
    return x.split(2), x.unbind(1)[0], x.chunk(3)[1]


@case(lambda: (leaf(3, 4),))
def views_of_an_intermediate(x):
    y = x * 2
    return y.view(-1), y[1]


@case(lambda: (leaf(3, 4),))
def views_of_a_view_made_under_no_grad(x):
    with torch.no_grad():
        y = x.view(-1)
        z = y.view(4, 3)
    return y, z, y.view(2, 6), z[0], x * 2


@case(lambda: (leaf(3, 4),))
def intermediate_view_made_under_no_grad(x):
    z = x * 2
    with torch.no_grad():
        y = z.view(-1)
    return y, z.sum()


@case(lambda: (leaf(3, 4),), forward_only="no gradient flows")
def only_a_view_made_under_no_grad(x):
    z = x * 2
    with torch.no_grad():
        return z.view(-1)


@slow_case(lambda: (leaf(4, 6),))
def one_of_several_views(x):
    first, second = x.split(2)
    return first.view(-1), second.unbind(1)[0], (x * 2).chunk(2)


def _overlapping() -> tuple[torch.Tensor, torch.Tensor]:
    base = torch.randn(10)
    return base[:6], base[3:9]


def _disjoint() -> tuple[torch.Tensor, torch.Tensor]:
    base = torch.randn(10)
    return base[:4], base[5:9]


@slow_case(_overlapping)
def overlapping_inputs_one_mutated(x, y):
    x.mul_(2)
    return x + y


@slow_case(_disjoint)
def disjoint_slices_one_mutated(x, y):
    x.mul_(2)
    return x + y


def _views_of_a_grad_base() -> tuple[torch.Tensor, torch.Tensor]:
    base = non_leaf(10)
    return base[:6], base[3:9]


@case(_views_of_a_grad_base, forward_only="gradients flow through")
def views_of_a_common_base_one_mutated(x, y):
    x.mul_(2)
    return x * y


def _twice_plain() -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(3, 4)
    return x, x


@case(_twice_plain)
def the_same_tensor_twice_and_mutated(x, y):
    x.mul_(2)
    return x + y


@slow_case(
    lambda: (torch.randn(2, 3),), members=lambda: {"mean": torch.zeros(3), "weight": nn.Parameter(torch.randn(3))}
)
def buffer_returned(self, x):
    self.mean.add_(x.mean(0))
    return x * self.weight, self.mean
