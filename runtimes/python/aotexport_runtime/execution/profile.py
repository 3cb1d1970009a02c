"""Stages of a call in the traces of `torch.profiler`; without an active profiler the only cost is to ask for one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.autograd import profiler


def active() -> bool:
    """Return whether a profiler is active; torch has no public way to ask, and without its name none is assumed."""
    return getattr(profiler, "_is_profiler_enabled", False)


def marked(label: str, run: Callable[..., Any], *args: Any) -> Any:
    """Return `run(*args)`, marked as `label` in the active profiler's trace."""
    with profiler.record_function(f"aotexport: {label}"):
        return run(*args)
