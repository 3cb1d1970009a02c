"""The faster library for a matmul: measured once per process, and kept for the next."""

from __future__ import annotations

import logging
import platform
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from aotexport_runtime.execution.matmul.sizes import operands
from aotexport_runtime.execution.user_cache import Measurements, cache_folder

log = logging.getLogger("aotexport_runtime")

_BUDGET_S = 0.3
"""Most seconds that a process measures."""

_lock = threading.Lock()
_known: dict[int, dict[str, bool]] = {}
"""Whether oneDNN was clearly faster, by number of threads and matmul."""
_left_s = _BUDGET_S


def described(op: str, args: Sequence[Any], is_fixed: Sequence[bool] = (True, True, True)) -> str:
    """Return the key under which a matmul is measured: whether a bias is added, sizes, orders in memory.

    Args:
        op: its operator.
        args: its operands.
        is_fixed: whether its rows, depth and columns are fixed; others have one key up to the next power of two.
    """
    bias, rows, matrix = operands(op, args)
    columns = matrix.t() if op == "aten::linear.default" else matrix
    m, k, n = (
        str(size) if fixed else f"<={1 << (size - 1).bit_length()}"
        for size, fixed in zip((*rows.shape, columns.shape[1]), is_fixed, strict=True)
    )
    return f"{'mm' if bias is None else 'addmm'} {m}x{k}@{_order(rows)} {k}x{n}@{_order(columns)}"


def _order(matrix: torch.Tensor) -> str:
    return "rows" if matrix.is_contiguous() else "columns" if matrix.t().is_contiguous() else "apart"


def kept(folder: Path | None, threads: int, *more: Any) -> Measurements:
    """Return the file of what was measured on this machine, with this torch, these threads, and further facts."""
    return Measurements(folder, [_processor(), torch.__version__, threads, *more])


def _processor() -> str:
    """Return the identity of this machine's processor: vendor, family, model, stepping."""
    try:
        lines = Path("/proc/cpuinfo").read_text().partition("\n\n")[0].splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    facts = dict([part.strip() for part in line.partition(":")[::2]] for line in lines)
    names = ("vendor_id", "cpu family", "model", "model name", "stepping")
    return ", ".join(facts[name] for name in names if name in facts) or platform.machine()


def faster_by_onednn(matmul: str, ours: Callable[[], object], torchs: Callable[[], object]) -> bool:
    """Return whether oneDNN (`ours`) computes `matmul` (see `described`) clearly faster; one answer per process."""
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
