"""Calls of the system by their number."""

from __future__ import annotations

import ctypes
import os


def call(number: int, *arguments: bytes | int | None) -> int:
    """Return what a call of the system returns, or raise the `OSError` that it fails with.

    Args:
        number: of the call.
        arguments: integers, and memory that the call reads; None: a null pointer.
    """
    passed = [ctypes.c_long(each) if isinstance(each, int) else ctypes.c_char_p(each) for each in arguments]
    found = ctypes.CDLL(None, use_errno=True).syscall(number, *passed)
    if found < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return found
