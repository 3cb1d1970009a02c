"""Read the resources that compiled code for NVIDIA GPUs needs. No torch, no CUDA.

Source: the attributes that `cuobjdump --dump-resource-usage` shows, in the section `.nv.info` of the ELF file.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

_REGISTERS, _FRAME = 0x2F, 0x11
_SIZED = 0x04
"""Format of attributes that are followed by their size in bytes; others have a value of two bytes in its place."""


@dataclass(frozen=True, kw_only=True)
class Resources:
    """Resources of a thread.

    Attributes:
        registers: registers of 32 bits.
        stack_nbytes: memory for spilled registers, and for arrays with computed indices.
    """

    registers: int
    stack_nbytes: int


def resources(code: bytes) -> Resources | None:
    """Return the resources of the kernel in `code`; None: it is no machine code, or of an unknown form."""
    try:
        found = dict(_attributes(_section(code, b".nv.info")))
        return Resources(registers=found[_REGISTERS], stack_nbytes=found.get(_FRAME, 0))
    except (struct.error, ValueError, KeyError, IndexError):
        return None


def _section(code: bytes, name: bytes) -> bytes:
    if not code.startswith(b"\x7fELF\x02"):
        raise ValueError("not a 64-bit ELF file")
    (start,) = struct.unpack_from("<Q", code, 0x28)
    size, count, names_index = struct.unpack_from("<HHH", code, 0x3A)
    headers = [struct.unpack_from("<IIQQQQIIQQ", code, start + index * size) for index in range(count)]
    names = headers[names_index][4]
    for header in headers:
        at = names + header[0]
        if code[at : code.index(b"\0", at)] == name:
            return code[header[4] : header[4] + header[5]]
    raise ValueError(f"no section {name!r}")


def _attributes(section: bytes) -> Iterator[tuple[int, int]]:
    """Yield attributes of functions, each with the value for the only function in a kernel's code."""
    at = 0
    while at < len(section):
        form, attribute, size = struct.unpack_from("<BBH", section, at)
        at += 4
        if form == _SIZED:
            if attribute in (_REGISTERS, _FRAME):
                yield attribute, struct.unpack_from("<II", section, at)[1]
            at += size
