"""Calls of the system by their number."""

from __future__ import annotations

import ctypes
import os


def call(number: int, *arguments: bytes | int | None) -> int:
    """Return what a call of the system returns.

    Args:
        number: of the call.
        arguments: integers, and memory that the call reads; None: a null pointer.

    Raises:
        OSError: the call fails.
    """
    found = ctypes.CDLL(None, use_errno=True).syscall(number, *map(_passed, arguments))
    if found < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return found


def _passed(argument: bytes | int | None) -> ctypes.c_long | ctypes.c_char_p:
    return ctypes.c_long(argument) if isinstance(argument, int) else ctypes.c_char_p(argument)
