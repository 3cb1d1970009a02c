"""Note what the model prints, logs and writes to files: a bundle does none of it."""

from __future__ import annotations

import builtins
import contextlib
import io
import logging
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

from aotexport.model.source_lines import is_library_file, is_stdlib_file, is_user_frame, own_room, user_line
from aotexport.process.patches import Patch, caller, patched

_CALL_MODELS = ("capture", "eager", "vectors")
"""Packages that call the model: in traces, and for real."""


@contextlib.contextmanager
def output_noted() -> Iterator[Callable[[], list[str]]]:
    """Watch `print`, `open` and loggers in the block; yield a function that returns a sentence per line of the user's.

    A sentence says how often the line ran so far: an export calls the model several times.
    """
    seen = Counter[tuple[str, str]]()

    def watched(plain: Callable[..., Any], does: str, is_output: Callable[..., bool] = lambda *_, **__: True) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            if is_output(*args, **kwargs) and _is_models(caller()):
                seen[user_line(), does] += 1
            return plain(*args, **kwargs)

        return call

    opened = watched(open, "writes to a file", _writes)
    with patched(
        Patch(builtins, "print", watched(print, "prints"), "Note that the model prints"),
        Patch(builtins, "open", opened, "Note that the model writes to a file"),
        Patch(io, "open", opened, "Note that the model writes to a file"),
        Patch(logging.Logger, "handle", watched(logging.Logger.handle, "logs", _is_users), "Note that the model logs"),
    ):
        yield lambda: [
            f"{line}the model {does}, and the bundle does not; this export ran the line {count} times"
            for (line, does), count in seen.items()
        ]


def _is_models(frame: FrameType | None) -> bool:
    """Return whether `frame` runs code of the model, or of Python for it, during a call of the model."""
    while frame is not None and is_stdlib_file(frame.f_code.co_filename):
        frame = frame.f_back
    if frame is None or not is_user_frame(frame):
        return False
    rooms = (room for frame, _ in traceback.walk_stack(frame) if (room := own_room(frame.f_code.co_filename)))
    return next((room in _CALL_MODELS for room in rooms if room != "process"), False)


def _is_users(logger: logging.Logger, record: logging.LogRecord) -> bool:
    """Return whether no library logs: those say many things once in a process."""
    return not is_library_file(record.pathname)


def _writes(file: Any, mode: Any = "r", *args: Any, **kwargs: Any) -> bool:
    return not set(str(mode)).isdisjoint("wax+")
