"""One computation timed against another, for a few milliseconds, on a machine that may be in use by others."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

MARGIN = 0.92
"""The part of the other's time that the faster one takes at most."""

_ROUNDS, _FEW_ROUNDS = 5, 3
_LONG_S = 1e-3
"""From how many seconds on few rounds do."""
_ROUND_S = 2e-4
"""The least time to measure in one go, in seconds."""

_UNSTEADY = 1.5
"""How far the median may be above the least time; above, others use the machine, and nothing is known."""


def clearly_faster(candidate: Callable[[], object], reference: Callable[[], object], limit_s: float) -> bool | None:
    """Return whether `candidate` is faster than `reference` beyond doubt; None: it could not be measured.

    Args:
        candidate: what might be faster.
        reference: what it is compared to.
        limit_s: seconds that the whole comparison may take; where it would take longer, little more is run than
            `reference`, once.
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
