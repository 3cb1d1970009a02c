"""The kernels of a bundle, as `aotexport inspect --kernels` shows them. No torch."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from aotexport_runtime.bundle.packs import TARGET, code_of, unpacked
from aotexport_runtime.bundle.read import Bundle
from aotexport_runtime.engines.cuda.choice import launches_of
from aotexport_runtime.schema.targets import Kernel

_REGISTERS, _FRAME = 0x2F, 0x11
_SIZED = 0x04
"""Format of attributes that are followed by their size in bytes; others have a value of two bytes in its place."""


@dataclass(frozen=True, kw_only=True)
class Resources:
    """Resources of a thread: registers of 32 bits, and memory for spilled ones and for arrays with computed indices."""

    registers: int
    stack_nbytes: int


@dataclass(frozen=True, kw_only=True)
class CodeFacts:
    """Compiled code of a kernel for one architecture: bytes of all candidates, the rest of the first candidate.

    Text, which a driver has still to compile, has no resources.
    """

    architecture: str
    nbytes: int
    shared_nbytes: int
    resources: Resources | None


@dataclass(frozen=True, kw_only=True)
class KernelFacts:
    """A kernel: the operators fused in it, `file:line` of the user's code that it came from, and its code.

    `launches` has the number of launches, per `program/forward` or `program/backward`.
    """

    name: str
    operators: tuple[str, ...]
    lines: tuple[str, ...]
    launches: dict[str, int]
    candidates: int
    code: tuple[CodeFacts, ...]


def kernel_facts(bundle: Bundle, program: str | None = None) -> list[KernelFacts]:
    """Return the facts about the kernels of a bundle, or of one program; `BundleInvalid`: a pack is damaged."""
    programs = [name for name in ([program] if program else bundle.program_names) if bundle.has_target(TARGET, name)]
    if not programs:
        return []
    library = bundle.kernels(TARGET)
    packs = {pack.architecture: unpacked(bundle, pack.architecture) for pack in library.packs}
    counts = {f"{name}/{part}": counter for name in programs for part, counter in launches_of(bundle, name).items()}
    facts = [_facts(kernel, counts, packs) for kernel in library.kernels]
    return [kernel for kernel in facts if kernel.launches]


def _facts(kernel: Kernel, counts: Mapping[str, Mapping[str, int]], packs: Mapping[str, bytes]) -> KernelFacts:
    return KernelFacts(
        name=kernel.name,
        operators=kernel.operators,
        lines=tuple(f"{line.file}:{line.line}" for line in kernel.lines),
        launches={part: counter[kernel.name] for part, counter in counts.items() if counter.get(kernel.name)},
        candidates=len(kernel.candidates),
        code=tuple(_code(kernel, packs)),
    )


def _code(kernel: Kernel, packs: Mapping[str, bytes]) -> Iterator[CodeFacts]:
    for architecture, pack in packs.items():
        binaries = [
            binary
            for candidate in kernel.candidates
            for binary in candidate.binaries
            if binary.architecture == architecture
        ]
        if binaries:
            yield CodeFacts(
                architecture=architecture,
                nbytes=sum(binary.nbytes for binary in binaries),
                shared_nbytes=binaries[0].shared_nbytes,
                resources=resources(code_of(binaries[0], pack)),
            )


def resources(code: bytes) -> Resources | None:
    """Return the resources of the kernel in `code`; None: it is no machine code, or of an unknown form.

    Source: the attributes that `cuobjdump --dump-resource-usage` shows, in the section `.nv.info` of the ELF file.
    """
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
