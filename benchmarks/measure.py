"""Rounds: every source in turn, so that whatever slows the machine slows all alike."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from contextlib import ExitStack
from typing import Any, TypeVar

from benchmarks.processes import NotMeasured, Source

Key = TypeVar("Key", bound=Hashable)
Samples = list[dict[str, Any]]


def alternate(sources: Mapping[Key, Callable[[], Source]], rounds: int) -> dict[Key, Samples | NotMeasured]:
    """Return the samples of each source, one per round, or why it has none.

    Every round asks all sources, in turns forwards and backwards, so that none always follows the same other.

    Args:
        sources: makers of sources; all are started, and make ready side by side, before the first round.
        rounds: how many samples to take of each.
    """
    results: dict[Key, Samples | NotMeasured] = {}
    with ExitStack() as stack:
        started: dict[Key, Source] = {}
        for key, start in sources.items():
            try:
                started[key] = start()
            except NotMeasured as reason:
                results[key] = reason
            else:
                stack.callback(started[key].close)
                results[key] = []
        for key, source in started.items():
            try:
                source.ready()
            except NotMeasured as reason:
                results[key] = reason
        for number in range(rounds):
            _round(started, results, backwards=number % 2 == 1)
    return {key: results[key] for key in sources}


def _round(started: dict[Key, Source], results: dict[Key, Samples | NotMeasured], *, backwards: bool) -> None:
    for key in reversed(started) if backwards else started:
        samples = results[key]
        if isinstance(samples, NotMeasured):
            continue
        try:
            samples.append(started[key].sample())
        except NotMeasured as reason:
            results[key] = reason
