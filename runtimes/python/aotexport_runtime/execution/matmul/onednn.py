"""Matmuls by oneDNN, which every torch for processors has, and the measured choice between it and torch's operators.

It keeps torch's operator within its bounds: it reads a bias as contiguous without checking, and fails on empty sums.
Results are fresh, in torch's layout, without gradients.
"""

from __future__ import annotations

import functools
import logging
import platform
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from aotexport_runtime.execution.matmul.sizes import Matmul, Mode, is_worth_choosing, operands
from aotexport_runtime.execution.user_cache import Measurements, cache_folder

log = logging.getLogger("aotexport_runtime")

Run = Callable[..., torch.Tensor]

_SIZES = 16
"""Most sizes of a matmul that are decided; oneDNN takes 0.7 ms to prepare for each."""

_linear: Run | None = getattr(getattr(torch.ops.mkldnn, "_linear_pointwise", None), "default", None)


def available() -> bool:
    """Return whether torch has oneDNN here, switched on and computing in full precision."""
    return (
        _linear is not None
        and torch.backends.mkldnn.is_available()
        and bool(torch.backends.mkldnn.enabled)
        and torch.get_float32_matmul_precision() == "highest"
    )


def linear(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Return `torch.nn.functional.linear` of these by oneDNN; no size is 0 or 1, the bias as long as a row."""
    if not _takes(weight):
        return functional.linear(rows, weight, bias)
    assert _linear is not None
    return _linear(rows, weight, None if bias is None else bias.contiguous(), "none", (), "")


def _takes(matrix: torch.Tensor) -> bool:
    """Return whether oneDNN has a layout for a second operand, or for its transpose."""
    return matrix.is_contiguous() or matrix.t().is_contiguous()


MATMULS: dict[str, Run] = {
    "aten::mm.default": lambda rows, matrix: linear(rows, matrix.t()),
    "aten::addmm.default": lambda bias, rows, matrix: linear(rows, matrix.t(), bias),
    "aten::linear.default": linear,
}
"""Operators by oneDNN, under the conditions of `linear`."""

_TORCHS: dict[str, Run] = {
    "aten::mm.default": torch.mm,
    "aten::addmm.default": torch.addmm,
    "aten::linear.default": functional.linear,
}


_MOST_NBYTES = 1 << 30
"""Most memory that packed matrices take."""


def packed(matrices: list[torch.Tensor], rows: int) -> list[torch.Tensor]:
    """Return matrices for a `product` with some rows, packed by oneDNN where that is measured to be faster."""
    is_plain = all(type(each) in (torch.Tensor, torch.nn.Parameter) and _takes(each) for each in matrices)
    is_plain = is_plain and {(each.dtype, each.device.type) for each in matrices} == {(torch.float32, "cpu")}
    if not is_plain or not available() or sum(each.nbytes for each in matrices) > _MOST_NBYTES:
        return matrices
    with torch.no_grad():
        return [_packed(each) if _is_faster_packed(each, rows) else each for each in matrices]


def _is_faster_packed(matrix: torch.Tensor, rows: int) -> bool:
    most, (depth, columns) = 1 << (rows - 1).bit_length(), matrix.shape
    ones, trial = torch.ones(most, depth), functools.cache(lambda: _packed(matrix))
    key = f"packed mm <={most}x{depth} {depth}x{columns}@{_order(matrix)}"
    return faster_by_onednn(key, lambda: product(ones, trial()), lambda: product(ones, matrix))


def _packed(matrix: torch.Tensor) -> torch.Tensor:
    return torch.ops.mkldnn._reorder_linear_weight(matrix.t().contiguous())


def product(*operands: torch.Tensor) -> torch.Tensor:
    """Return a matmul, or one with a bias before it, whose matrix may be packed."""
    *bias, rows, matrix = operands
    if not matrix.is_mkldnn:
        return torch.addmm(bias[0], rows, matrix) if bias else torch.mm(rows, matrix)
    assert _linear is not None
    if bias and bias[0].shape == matrix.shape[:1]:
        return _linear(rows, matrix, bias[0].contiguous(), "none", (), "")
    found = _linear(rows, matrix, None, "none", (), "")
    return found.add_(bias[0]) if bias else found


def prefers_onednn(
    op: str, args: Sequence[torch.Tensor], mode: Mode, is_fixed: Sequence[bool] = (True, True, True)
) -> bool:
    """Return whether oneDNN is to compute a matmul of these operands; measures it where `mode` is `fastest`.

    `is_fixed`: whether its rows, depth and columns are fixed; others are measured once up to the next power of two.
    """
    bias, rows, matrix = operands(op, args)
    if mode == "torch" or not available() or rows.device.type != "cpu" or not _takes(matrix):
        return False
    if mode == "onednn":
        return True
    columns = matrix.t() if op == "aten::linear.default" else matrix
    m, k, n = (
        str(size) if fixed else f"<={1 << (size - 1).bit_length()}"
        for size, fixed in zip((*rows.shape, columns.shape[1]), is_fixed, strict=True)
    )
    key = f"{'mm' if bias is None else 'addmm'} {m}x{k}@{_order(rows)} {k}x{n}@{_order(columns)}"
    return faster_by_onednn(key, functools.partial(MATMULS[op], *args), functools.partial(_TORCHS[op], *args))


def _order(matrix: torch.Tensor) -> str:
    return "rows" if matrix.is_contiguous() else "columns" if matrix.t().is_contiguous() else "apart"


def would_prefer_onednn(matmul: Matmul, sizes: tuple[int, int, int], mode: Mode) -> bool:
    """Return what the first call of a matmul of these rows, depth and columns decides."""
    rows, depth, columns = sizes
    matrix = torch.ones(columns, depth).t() if matmul.is_turned else torch.ones(depth, columns)
    if matmul.adds:
        return prefers_onednn("aten::addmm.default", [torch.ones(columns), torch.ones(rows, depth), matrix], mode)
    return prefers_onednn("aten::mm.default", [torch.ones(rows, depth), matrix], mode)


def replacement(op: str, mode: Mode, is_fixed: Sequence[bool]) -> Run:
    """Return a function that computes a matmul; it chooses a library at the first call of each size.

    Sizes after the first few run by torch's operator. `is_fixed`: see `prefers_onednn`.
    """
    chosen: dict[Any, Run] = {}
    torchs, first = _TORCHS[op], 1 if op == "aten::addmm.default" else 0

    def matmul(*args: Any) -> Any:
        sizes = args[first].shape, args[first + 1].shape
        run = chosen.get(sizes)
        if run is None:
            # Tensors of tracers and transforms cannot be timed.
            is_plain = all(type(arg) in (torch.Tensor, torch.nn.Parameter) for arg in args if arg is not None)
            if len(chosen) == _SIZES or not is_plain:
                return torchs(*args)
            rows, depth, columns = *sizes[0], sizes[1][0 if op == "aten::linear.default" else 1]
            prefers = is_worth_choosing(mode, rows, depth, columns) and prefers_onednn(op, args, mode, is_fixed)
            run = chosen[sizes] = MATMULS[op] if prefers else torchs
        return run(*args)

    return matmul


# --- measured once per process, and kept for the next -------------------------------------------------------

_BUDGET_S = 0.3
"""Most seconds that a process measures."""

_lock = threading.Lock()
_known: dict[int, dict[str, bool]] = {}
"""Whether oneDNN was clearly faster, by number of threads and matmul."""
_left_s = _BUDGET_S


def kept(folder: Path | None, threads: int, *more: Any) -> Measurements:
    """Return the file of what was measured on this machine, with this torch, these threads, and further facts."""
    return Measurements(folder, [_processor(), torch.__version__, threads, *more])


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().partition("\n\n")[0].splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    facts = dict([part.strip() for part in line.partition(":")[::2]] for line in lines)
    names = ("vendor_id", "cpu family", "model", "model name", "stepping")
    return ", ".join(facts[name] for name in names if name in facts) or platform.machine()


def faster_by_onednn(matmul: str, ours: Callable[[], object], torchs: Callable[[], object]) -> bool:
    """Return whether oneDNN (`ours`) computes a matmul clearly faster; one answer per process."""
    global _left_s
    threads = torch.get_num_threads()
    with _lock:
        cache = kept(cache_folder("matmul"), threads)
        if threads not in _known:
            _known[threads] = {key: found for key, found in cache.read().items() if type(found) is bool}
        known = _known[threads]
        if matmul not in known:
            start = time.perf_counter()
            found = clearly_faster(ours, torchs, _left_s)
            _left_s -= time.perf_counter() - start
            log.debug("matmul %s: oneDNN clearly faster: %s", matmul, found)
            known[matmul] = bool(found)
            if found is not None:
                cache.add(matmul, found)
        return known[matmul]


_MARGIN = 0.92
"""Most time of the faster computation, as a part of the other's."""

_ROUNDS = 4
_ROUND_S = 2e-4
"""Least seconds of one measurement."""

_UNSTEADY = 1.5
"""Most ratio of median to least time; above, the machine is busy and the result unknown."""


def clearly_faster(candidate: Callable[[], object], reference: Callable[[], object], limit_s: float) -> bool | None:
    """Return whether `candidate` is faster than `reference` beyond doubt; None: it could not be measured.

    Where the comparison would take longer than `limit_s` seconds, `reference` runs once and nothing else.
    """
    if limit_s <= 0 or 2 * _ROUNDS * _timed(reference, 1) > limit_s:
        return None
    candidate()
    times = max(1, int(_ROUND_S / _timed(reference, 1)))
    ours, others = zip(*[(_timed(candidate, times), _timed(reference, times)) for _ in range(_ROUNDS)], strict=True)
    if min(ours) > _MARGIN * min(others):
        return False
    steady = all(statistics.median(each) <= _UNSTEADY * min(each) for each in (ours, others))
    return True if steady and statistics.median(ours) <= _MARGIN * statistics.median(others) else None


def _timed(run: Callable[[], object], times: int) -> float:
    start = time.perf_counter()
    for _ in range(times):
        run()
    return max(time.perf_counter() - start, 1e-9) / times
