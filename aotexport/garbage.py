"""Python's search for garbage while graphs are traced."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

_ALLOCATIONS = 100_000
"""After how many new objects Python looks for garbage among them; its own number is 700."""


@contextlib.contextmanager
def collected_rarely() -> Iterator[None]:
    """Look for garbage less often in this block.

    What a trace makes lives as long as its graph, and would be looked through again and again: a tenth of the time of
    an export of thousands of operators. Fake tensors have no memory that waits to be freed.
    """
    before = gc.get_threshold()
    if before[0]:
        gc.set_threshold(max(before[0], _ALLOCATIONS), *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)
