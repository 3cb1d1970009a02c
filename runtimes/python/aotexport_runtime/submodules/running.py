"""Functions of submodules in the call that a thread is running."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

from torch import nn

_RUNNING = threading.local()


def running_parts() -> dict[int, Callable[..., Any]]:
    """Return the functions of submodules in the call that this thread is running, by `id` of the submodule."""
    try:
        return _RUNNING.parts
    except AttributeError:
        _RUNNING.parts = {}
        return _RUNNING.parts


@contextmanager
def running(module: nn.Module, part: Callable[..., Any]) -> Generator[None, None, None]:
    """Let a call of `module` run `part`."""
    parts = running_parts()
    before = parts.get(id(module))
    parts[id(module)] = part
    try:
        yield
    finally:
        if before is None:
            del parts[id(module)]
        else:
            parts[id(module)] = before
