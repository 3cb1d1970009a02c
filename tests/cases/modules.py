"""Modules: ties, shared submodules, normalisation, recurrence, attention, constants, frozen parameters."""

import torch
from torch import nn

from tests.cases import case, slow_case

CLOSED_OVER = torch.linspace(0, 1, 4)


@case(lambda: (torch.randn(6, 3, 8, 8),))
class ConvolutionsWithBatchNorm(nn.Sequential):
    def __init__(self):
        super().__init__(
            nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(36, 2)
        )


@case(lambda: (torch.randint(0, 10, (2, 5)),))
class TiedWeights(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(10, 4)
        self.head = nn.Linear(4, 10, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids):
        return self.head(self.embedding(ids).tanh())


@case(lambda: (torch.randn(2, 4),))
class SharedSubmodule(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = self.first
        self.third = nn.Linear(4, 4)
        self.third.weight = self.first.weight

    def forward(self, x):
        return self.third(self.second(self.first(x)))


@slow_case(
    lambda: (torch.randn(2, 4),),
    members=lambda: {"frozen": nn.Linear(4, 4).requires_grad_(False), "head": nn.Linear(4, 2)},
)
def frozen_part(self, x):
    return self.head(self.frozen(x).relu())


@slow_case(lambda: (torch.randn(2, 4),))
class ConstantsOfEveryKind(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4))
        self.plain = torch.randn(4)
        self.listed = [torch.randn(4), torch.randn(4)]
        self.register_buffer("hidden", torch.randn(4), persistent=False)

    def forward(self, x):
        return x * self.weight + self.plain + self.listed[1] + self.hidden + CLOSED_OVER + torch.tensor([1.0, 2, 3, 4])


@case(lambda: (torch.randn(3, 2, 8),))
class EncoderLayer(nn.TransformerEncoderLayer):
    def __init__(self):
        super().__init__(8, 2, 16)


@case(lambda: (torch.randn(2, 6, 5, 5),))
class Normalisations(nn.Sequential):
    def __init__(self):
        super().__init__(nn.GroupNorm(2, 6), nn.InstanceNorm2d(6, affine=True, track_running_stats=True), nn.GELU())


@slow_case(lambda: (torch.randn(2, 4),), programs=["train", "infer", "eval-joint"])
class ThreePrograms(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 2))


@case(lambda: (torch.randn(2, 4),))
class NonContiguousState(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 4).t())
        storage = torch.randn(12)
        self.register_buffer("left", storage[:8])
        self.register_buffer("right", storage[4:])

    def forward(self, x):
        self.left.add_(0.5)
        return (x @ self.weight).sum(1) + self.right.sum()


class Norm(nn.Module):
    def forward(self, x):
        return x / x.norm()


@case(lambda: (torch.randn(2, 4),))
class WeightNormed(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.utils.parametrizations.weight_norm(nn.Linear(4, 3))
        nn.utils.parametrize.register_parametrization(self.layer, "bias", Norm())

    def forward(self, x):
        return self.layer(x)


@case(lambda: (torch.randn(2, 4),), members=lambda: {"layer": nn.utils.parametrizations.spectral_norm(nn.Linear(4, 3))})
def spectral_normed(self, x):
    return self.layer(x)


@case(lambda: (torch.randn(2, 3),), members=lambda: {"layer": nn.Linear(3, 3)})
def converted_in_the_call(self, x):
    """Converts a submodule to the dtype that it has."""
    return self.layer.to(x.dtype)(x)
