"""Replacements of matmuls in generated code, which choose between torch's operator and oneDNN."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from aotexport_runtime.execution import ops
from aotexport_runtime.execution.matmul import onednn
from aotexport_runtime.execution.matmul.measured import described, faster_by_onednn
from aotexport_runtime.execution.matmul.modes import Mode, is_worth_choosing
from aotexport_runtime.execution.matmul.sizes import operands

Run = Callable[..., Any]

_SIZES = 16
"""Most sizes of a dynamic matmul that are decided; oneDNN takes 0.7 ms to prepare for each."""


class MatmulReplacement(Protocol):
    """Replaces one matmul of a graph."""

    def install(self, scope: dict[str, Any], name: str) -> None:
        """Put a function that computes the matmul into `scope` as `name`."""
        ...


class FirstCall:
    """A matmul of fixed sizes: its first call with tensors chooses a function, which replaces it in the scope."""

    def __init__(self, op: str, mode: Mode) -> None:
        """Replace an operator of `onednn.MATMULS` on tensors of known sizes."""
        self._op = op
        self._mode: Mode = mode
        self._torchs = _torchs(op)
        self._put: Callable[[Run], None] | None = None

    def install(self, scope: dict[str, Any], name: str) -> None:
        """Put this into `scope` as `name`; the first call puts the chosen function there."""
        scope[name] = self
        self._put = functools.partial(scope.__setitem__, name)

    def __call__(self, *args: Any) -> Any:
        """Compute the matmul."""
        if not _are_plain(args):
            return self._torchs(*args)
        prefers = _prefers_onednn(self._op, args, self._mode, described(self._op, args))
        chosen = onednn.MATMULS[self._op] if prefers else self._torchs
        if self._put is not None:
            self._put(chosen)
        return chosen(*args)


class EverySize:
    """A matmul of dynamic sizes: each size is decided at its first call.

    A dynamic size is measured once for all sizes up to the next power of two. Sizes after the first few run by torch's
    operator, since oneDNN prepares for each.
    """

    def __init__(self, op: str, mode: Mode, known: Sequence[bool]) -> None:
        """Replace an operator of `onednn.MATMULS`; `known`: whether its rows, depth and columns are fixed."""
        self._op = op
        self._mode: Mode = mode
        self._known = known
        self._torchs = _torchs(op)

    def install(self, scope: dict[str, Any], name: str) -> None:
        """Put a function that chooses into `scope` as `name`."""
        chosen: dict[Any, Run] = {}
        torchs, rows = self._torchs, 1 if self._op == "aten::addmm.default" else 0

        def matmul(*args: Any) -> Any:
            sizes = args[rows].shape, args[rows + 1].shape
            run = chosen.get(sizes)
            if run is None:
                if len(chosen) == _SIZES or not _are_plain(args):
                    return torchs(*args)
                run = chosen[sizes] = self._chosen(args)
            return run(*args)

        scope[name] = matmul

    def _chosen(self, args: Sequence[Any]) -> Run:
        bias, rows, matrix = operands(self._op, args)
        matrix = matrix.t() if self._op == "aten::linear.default" else matrix
        sizes = *rows.shape, matrix.shape[1]
        if not is_worth_choosing(self._mode, rows.shape[0], rows.shape[1], matrix.shape[1]):
            return self._torchs
        m, k, n = (
            str(size) if known else f"<={_next_power(size)}" for size, known in zip(sizes, self._known, strict=True)
        )
        kind = "mm" if bias is None else "addmm"
        matmul = f"{kind} {m}x{k}@{_order(rows)} {k}x{n}@{_order(matrix)}"
        prefers = _prefers_onednn(self._op, args, self._mode, matmul)
        return onednn.MATMULS[self._op] if prefers else self._torchs


def prefers_onednn(rows: int, depth: int, columns: int, *, adds: bool, is_turned: bool, mode: Mode) -> bool:
    """Return whether oneDNN computes a matmul of such matrices on this machine, as its first call would decide.

    Args:
        rows: of the first matrix.
        depth: columns of the first matrix, rows of the second.
        columns: of the second matrix.
        adds: whether a bias is added.
        is_turned: whether the second matrix lies in memory column by column.
        mode: see `replacements`.
    """
    if mode == "torch":
        return False
    matrix = torch.ones(columns, depth).t() if is_turned else torch.ones(depth, columns)
    args = [torch.ones(rows, depth), matrix]
    op = "aten::mm.default"
    if adds:
        op, args = "aten::addmm.default", [torch.ones(columns), *args]
    return _prefers_onednn(op, args, mode, described(op, args))


def _torchs(op: str) -> Run:
    return ops.direct(op) or ops.resolve(op, None, frozenset())


def _are_plain(args: Sequence[Any]) -> bool:
    """Return whether the arguments are real tensors, which can be timed: not those of tracers and transforms."""
    return all(type(arg) in (torch.Tensor, torch.nn.Parameter) for arg in args if arg is not None)


def _prefers_onednn(op: str, args: Sequence[Any], mode: Mode, matmul: str) -> bool:
    _, rows, matrix = operands(op, args)
    if not onednn.available() or rows.device.type != "cpu" or not onednn.takes(matrix, matrix.t()):
        return False
    if mode == "onednn":
        return True
    return faster_by_onednn(matmul, functools.partial(onednn.MATMULS[op], *args), functools.partial(_torchs(op), *args))


def _next_power(size: int) -> int:
    return 1 << (size - 1).bit_length()


def _order(matrix: torch.Tensor) -> str:
    """Return the memory order of a matrix, for any sizes."""
    return "rows" if matrix.is_contiguous() else "columns" if matrix.t().is_contiguous() else "apart"
