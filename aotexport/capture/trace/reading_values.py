"""Decompose operators that read the values of their tensors into operators that a trace can follow.

Some return a Python bool or branch inside: the values they read must be in the graph, so that it can check them. Others
make tensors of data-dependent sizes without saying so, hold sizes to one value, or are internal to torch and not
allowed in bundles.
"""

from __future__ import annotations

import functools
import math
import operator
from typing import Any

import torch

from aotexport.capture.effects.sizes_as_integers import one_hot
from aotexport.process.patches import Patch
from aotexport.torch_internals.checks import follows_values, is_data_dependent

aten = torch.ops.aten


def _equal(left: torch.Tensor, right: torch.Tensor) -> bool:
    followed = [size for size in (*left.shape, *right.shape) if follows_values(size)]
    if not followed or left.dim() != right.dim():
        return left.shape == right.shape and bool(torch.eq(left, right).all())
    # Whether a dynamic size is the other's is part of the question, and is not fixed.
    sizes = list(zip(left.shape, right.shape, strict=True))
    common = tuple([slice(torch.sym_min(one, other)) for one, other in sizes])
    same: Any = torch.eq(left[common], right[common]).all().item()
    return bool(functools.reduce(operator.and_, (one == other for one, other in sizes), same))


def _allclose(
    left: torch.Tensor, right: torch.Tensor, rtol: float = 1e-5, atol: float = 1e-8, equal_nan: bool = False
) -> bool:
    return bool(torch.isclose(left, right, rtol, atol, equal_nan).all())


def _combinations(values: torch.Tensor, r: int = 2, with_replacement: bool = False) -> torch.Tensor:
    """Compute `combinations`, whose kernel asks for the number of values."""
    size: Any = values.shape[0]
    grids = torch.meshgrid([torch.arange(size, device=values.device)] * r, indexing="ij")
    rises = map(operator.le if with_replacement else operator.lt, grids, grids[1:])
    chosen = functools.reduce(torch.logical_and, rises, torch.ones_like(grids[0], dtype=torch.bool))
    count = math.prod(size + (index if with_replacement else -index) for index in range(r)) // math.factorial(r)
    return values[torch.nonzero_static(chosen, size=count)]


def _ctc_loss(
    log_probs: torch.Tensor,
    targets: torch.Tensor,
    input_lengths: Any,
    target_lengths: Any,
    blank: int = 0,
    reduction: int = 1,
    zero_infinity: bool = False,
) -> torch.Tensor:
    """Compute the loss by the operator that tells the sizes of its table. Source: torch 2.13, `LossCTC.cpp`."""
    batched = log_probs if log_probs.dim() == 3 else log_probs.unsqueeze(1)
    targets = targets.to(log_probs.device, torch.int64)
    # Torch's own choice of the overload asks for the lengths of the tensors, which fixes a dynamic batch.
    table = aten._ctc_loss.Tensor if isinstance(input_lengths, torch.Tensor) else aten._ctc_loss.default
    losses, _ = table(batched, targets, input_lengths, target_lengths, blank, zero_infinity)
    if zero_infinity:
        losses = torch.where(losses == math.inf, losses.new_zeros(()), losses)
    if reduction == 1:
        lengths = torch.as_tensor(target_lengths, dtype=losses.dtype, device=losses.device)
        return (losses / lengths.clamp_min(1)).mean()
    if reduction == 2:
        return losses.sum()
    return losses if log_probs.dim() == 3 else losses.squeeze(0)


def _unbind(tensor: torch.Tensor, dim: int = 0) -> Any:
    """Return the slices along an axis. Torch 2.13 leaves the axis in a single slice of a data-dependent axis."""
    size: Any = tensor.shape[dim]
    if isinstance(size, int) or not is_data_dependent(size):
        return NotImplemented
    return [tensor.select(dim, index) for index in range(int(size))]


class _Lstsq:
    """Least squares; the sizes of its result depend on whether the matrices have full rank."""

    def __init__(self) -> None:
        self._inside = False

    def __call__(
        self, matrix: torch.Tensor, right: torch.Tensor, rcond: float | None = None, *, driver: str | None = None
    ) -> Any:
        rows, columns = matrix.shape[-2:]
        if self._inside or driver not in ("gelsd", "gelss") or rows <= columns:
            return NotImplemented
        self._inside = True
        try:
            result = aten.linalg_lstsq.default(matrix, right, rcond, driver=driver)
        finally:
            self._inside = False
        torch._check((result[2] == columns).all().item())
        return result


def _random_(tensor: torch.Tensor, low: int, high: int | None, *, generator: Any = None) -> torch.Tensor:
    """Write random integers by an operator that a graph's code can call: `from` is a keyword of Python."""
    if high is None or generator is not None:
        return NotImplemented
    return tensor.copy_(torch.randint_like(tensor.detach(), low, high))


def _zeros_of_tangent(tangent: torch.Tensor, primal: torch.Tensor, *, self_num_batch_dims: int = 0) -> torch.Tensor:
    """Return zeros in the primal's layout, behind the tangent's own axes of `torch.vmap`.

    Forward-mode differentiation copies tangents of other layouts there.
    Source: torch 2.13, aten/src/ATen/native/TensorFactories.cpp, `_new_zeros_with_same_feature_meta`.
    """
    batch = tangent.shape[:self_num_batch_dims]
    count = primal.untyped_storage().nbytes() // primal.element_size()
    zeros = primal.new_zeros((*batch, count))
    strides = (*zeros.stride()[:-1], *primal.stride())
    return zeros.as_strided((*batch, *primal.shape), strides, primal.storage_offset())


def _where(condition: torch.Tensor, chosen: Any, other: Any) -> Any:
    """Choose by a mask of bytes, which eager takes and torch 2.13's fake kernel does not."""
    return torch.where(condition != 0, chosen, other) if condition.dtype == torch.uint8 else NotImplemented


def _fill_diagonal_(tensor: torch.Tensor, value: float, wrap: bool = False) -> Any:
    """Fill the diagonal of a matrix of dynamic sizes, which torch's function reads."""
    if wrap or tensor.dim() != 2 or all(isinstance(size, int) for size in tensor.shape):
        return NotImplemented
    tensor.diagonal().fill_(value)
    return tensor


_COMPOSITE = (aten.narrow.Tensor, aten.cov.default, aten.corrcoef.default)

READING_VALUES: dict[Any, Any] = {
    aten.equal.default: _equal,
    aten.allclose.default: _allclose,
    aten.one_hot.default: one_hot,
    aten.combinations.default: _combinations,
    aten.ctc_loss.IntList: _ctc_loss,
    aten.ctc_loss.Tensor: _ctc_loss,
    aten.linalg_lstsq.default: _Lstsq(),
    getattr(aten.random_, "from"): _random_,
    aten.unbind.int: _unbind,
    aten.fill_diagonal_.default: _fill_diagonal_,
    aten._new_zeros_with_same_feature_meta.default: _zeros_of_tangent,
    **dict.fromkeys((aten.where.self, aten.where.ScalarSelf, aten.where.ScalarOther, aten.where.Scalar), _where),
    **{operator: operator.decompose for operator in _COMPOSITE},
}
"""Functions to trace in place of operators, by operator."""

READING_FUNCTIONS = [
    Patch(owner, name, function, "Ask for a truth value where a run has no operators to replace")
    for owner in (torch, torch.Tensor)
    for name, function in (("equal", _equal), ("allclose", _allclose))
]
"""Patches of torch's functions that return a truth value."""
