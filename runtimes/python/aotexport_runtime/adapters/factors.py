"""Low-rank changes of weights (`scaling * B @ A`), a class for each thing that an operator does with one.

No method of a training step makes a tensor of the size of a weight. Shapes are those of peft's files.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from aotexport_runtime.adapters.config import LoraConfig
from aotexport_runtime.engines.forward.readers import Kind


class Factors(nn.Module):
    """The factors of a change of a linear layer's weight (outputs by inputs).

    Attributes:
        A: parameter, rank by inputs; B: outputs by rank.
        magnitude: parameter, the length of each row of the changed weight; None: they follow from the change.
        ratio: while the weight holds the change: what the magnitude multiplied its rows with.
    """

    def __init__(
        self, weight: torch.Tensor, r: int, config: LoraConfig, scaling: float, options: Sequence[Any]
    ) -> None:
        """Begin with a change of zero; `options` are what the operator takes after its bias."""
        super().__init__()
        half = weight.dtype in (torch.float16, torch.bfloat16)
        dtype = torch.float32 if half else weight.dtype
        self._options = tuple(options)
        self.groups = groups_of(options)
        self.scaling = scaling
        self.dropout = config.dropout
        self.ratio: torch.Tensor | None = None
        a, b = (weight.new_empty(shape, dtype=dtype) for shape in self.shapes(weight, r, options))
        self._begin(a, b)
        self.A, self.B = nn.Parameter(a), nn.Parameter(b)
        self.magnitude = nn.Parameter(self._norm(weight.detach())) if config.use_dora else None

    @staticmethod
    def _begin(a: torch.Tensor, b: torch.Tensor) -> None:
        """Fill factors that change nothing; draws the random numbers that peft draws."""
        for factor in (a, b, a):
            nn.init.kaiming_uniform_(factor, a=math.sqrt(5))
        nn.init.zeros_(b)

    @classmethod
    def shapes(cls, weight: torch.Tensor, r: int, options: Sequence[Any]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the shapes of A and B."""
        outputs, inputs = cls.rows(weight).shape
        return (r, inputs), (outputs, r)

    @staticmethod
    def rows(weight: torch.Tensor) -> torch.Tensor:
        """Return the weight as outputs by inputs."""
        return weight.flatten(1)

    @staticmethod
    def unrows(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Return a matrix of outputs by inputs in the layout of the weight."""
        return rows.view(weight.shape)

    def _low(self, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(x, self.A) * self.scaling

    def _high(self, low: torch.Tensor) -> torch.Tensor:
        return functional.linear(low, self.B)

    def _base(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Return what the operator computes without a bias."""
        return functional.linear(x, self.rows(weight))

    def forward(
        self, result: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """Return the changed result of an operator, given its input, weight and bias."""
        dropped = functional.dropout(x, self.dropout, self.training) if self.dropout else x
        cast = dropped.is_floating_point() and not _autocasts(dropped)
        low = self._low(dropped.to(self.A.dtype) if cast else dropped)
        if self.magnitude is None:
            return self._added(result, low)
        if dropped is not x:
            base = self._base(dropped, weight)
        else:
            base = result if bias is None else result - self._beside(bias)
        factor = self._beside(self.magnitude / self._norm(weight.detach()))
        return (result + (factor - 1) * base + factor * self._high(low)).to(result.dtype)

    def _added(self, result: torch.Tensor, low: torch.Tensor) -> torch.Tensor:
        """Return the result plus low-rank values times B: one matmul that adds, where dtypes are the same."""
        alike = result.dtype == low.dtype == self.B.dtype and not _autocasts(result)
        if self.B.dim() > 2 or not alike or not result.is_contiguous():
            return (result + self._high(low)).to(result.dtype)
        flat = result.view(-1, result.shape[-1])
        return torch.addmm(flat, low.reshape(-1, low.shape[-1]), self.B.t()).view(result.shape)

    def _beside(self, values: torch.Tensor) -> torch.Tensor:
        """Return a value per output in the shape that results take."""
        return values.view(-1, *(1 for _ in self.B.shape[2:]))

    def _norm(self, weight: torch.Tensor) -> torch.Tensor:
        """Return the length of each row of the changed weight, without a tensor of its size."""
        with torch.no_grad():
            rows = self.rows(weight).to(self.A.dtype)
            a, b = self.A.flatten(1), self.B.flatten(1)
            squares = torch.linalg.vector_norm(rows, dim=1).square()
            squares += 2 * self.scaling * ((rows @ a.t()) * b).sum(dim=1)
            squares += self.scaling * self.scaling * ((b @ (a @ a.t())) * b).sum(dim=1)
            return squares.clamp_(min=0).sqrt_()

    def _change(self, weight: torch.Tensor) -> torch.Tensor:
        return (self.scaling * (self.B.flatten(1) @ self.A.flatten(1))).to(weight.dtype)

    def merged(self, weight: torch.Tensor) -> torch.Tensor:
        """Return the changed weight."""
        rows = self.rows(weight) + self._change(weight)
        if self.magnitude is not None:
            rows = rows * (self.magnitude / self._norm(weight)).unsqueeze(1).to(weight.dtype)
        return self.unrows(rows, weight)

    def merge(self, weight: torch.Tensor) -> None:
        """Change the weight in place."""
        if self.magnitude is not None:
            self.ratio = (self.magnitude / self._norm(weight)).unsqueeze(1).detach()
        weight.copy_(self.merged(weight))

    def unmerge(self, weight: torch.Tensor) -> None:
        """Take a change by `merge` back, but for rounding."""
        rows = self.rows(weight)
        if self.ratio is not None:
            rows, self.ratio = rows / self.ratio.to(weight.dtype), None
        weight.copy_(self.unrows(rows - self._change(weight), weight))


class TransposedFactors(Factors):
    """The factors of a change of a weight of inputs by outputs."""

    @staticmethod
    def rows(weight: torch.Tensor) -> torch.Tensor:
        return weight.t()

    @staticmethod
    def unrows(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return rows.t()


class EmbeddingFactors(TransposedFactors):
    """The factors of a change of an embedding (entries by size): A is rank by entries, B size by rank."""

    @staticmethod
    def _begin(a: torch.Tensor, b: torch.Tensor) -> None:
        for factor in (a, b, b):
            nn.init.normal_(factor)
        nn.init.zeros_(a)

    def forward(
        self, result: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """Return the changed result of an operator; as in peft, without dropout and in the result's dtype."""
        added = self._added(result, torch.embedding(self.A.t(), x, *self._options) * self.scaling)
        if self.magnitude is None:
            return added
        return (self.magnitude / self._norm(weight.detach()) * added).to(result.dtype)


class ConvolutionFactors(Factors):
    """The factors of a change of a convolution: A is a convolution of all channels to `r`, B one of size 1.

    Where the convolution is in groups, B alone is, as in peft.
    """

    @classmethod
    def shapes(cls, weight: torch.Tensor, r: int, options: Sequence[Any]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        (outputs, inputs, *size), groups = weight.shape, groups_of(options)
        return (r, inputs * groups, *size), (outputs, r // groups, *(1 for _ in size))

    def _low(self, x: torch.Tensor) -> torch.Tensor:
        return _convolved(x, self.A, *self._options[:3]) * self.scaling

    def _high(self, low: torch.Tensor) -> torch.Tensor:
        return _convolved(low, self.B, 1, 0, 1, self.groups)

    def _base(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return _convolved(x, weight, *self._options)


class Whole(nn.Module):
    """A tensor that is trained in the place of one of the module.

    Attributes:
        value: parameter; while the module's tensor holds it: the module's own value.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        super().__init__()
        self.value = nn.Parameter(tensor.detach().clone())

    def merged(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the trained tensor."""
        return self.value

    def merge(self, tensor: torch.Tensor) -> None:
        """Exchange the two tensors' values."""
        before = tensor.clone()
        tensor.copy_(self.value)
        self.value.copy_(before)

    unmerge = merge


def groups_of(options: Sequence[Any]) -> int:
    """Return the number of groups of a convolution, given what it takes after its bias."""
    return options[3] if len(options) > 3 else 1


def _convolved(x: torch.Tensor, weight: torch.Tensor, *options: Any) -> torch.Tensor:
    convolution = (functional.conv1d, functional.conv2d, functional.conv3d)[weight.dim() - 3]
    return convolution(x, weight, None, *options)


def _autocasts(x: torch.Tensor) -> bool:
    return torch.is_autocast_enabled(x.device.type)


FACTORS: dict[Kind, type[Factors]] = {
    "linear": Factors,
    "transposed": TransposedFactors,
    "embedding": EmbeddingFactors,
    "convolution": ConvolutionFactors,
}
