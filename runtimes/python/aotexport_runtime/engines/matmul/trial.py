"""Times one computation against another, for a few milliseconds, on a machine that may be busy."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

MARGIN = 0.92
"""Most time of the faster computation, as a part of the other's."""

_ROUNDS, _FEW_ROUNDS = 5, 3
_LONG_S = 1e-3
"""Computations of at least so many seconds run `_FEW_ROUNDS`."""
_ROUND_S = 2e-4
"""Least seconds of one measurement."""

_UNSTEADY = 1.5
"""Most ratio of median to least time; above, the machine is busy and the result unknown."""


def clearly_faster(candidate: Callable[[], object], reference: Callable[[], object], limit_s: float) -> bool | None:
    """Return whether `candidate` is faster than `reference` beyond doubt; None: it could not be measured.

    Args:
        candidate: the computation that may be faster.
        reference: the computation to compare with.
        limit_s: most seconds of the whole comparison; where it would take longer, `reference` runs once and nothing
            else.
    """
    if limit_s <= 0 or 2 * _FEW_ROUNDS * _timed(reference, 1) > limit_s:
        return None
    candidate()
    once = _timed(reference, 1)
    times = max(1, int(_ROUND_S / once))
    rounds = _ROUNDS if once < _LONG_S else _FEW_ROUNDS
    ours, others = zip(*[(_timed(candidate, times), _timed(reference, times)) for _ in range(rounds)], strict=True)
    if min(ours) > MARGIN * min(others):
        return False
    steady = all(statistics.median(each) <= _UNSTEADY * min(each) for each in (ours, others))
    return True if steady and statistics.median(ours) <= MARGIN * statistics.median(others) else None


def _timed(run: Callable[[], object], times: int) -> float:
    """Return the seconds that one of `times` runs takes."""
    start = time.perf_counter()
    for _ in range(times):
        run()
    return max(time.perf_counter() - start, 1e-9) / times
