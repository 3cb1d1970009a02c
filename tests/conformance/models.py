"""Small models and arguments of several files of tests."""

import torch
from torch import nn


def leaf(*shape):
    return torch.randn(*shape, requires_grad=True)


def linear():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))


def gradient_inside(x):
    (gradient,) = torch.autograd.grad((x @ x).square().sum(), x, create_graph=True)
    return gradient
