"""Rules of kernels: names, packs, and compiled code within the packs."""

from __future__ import annotations

import re

from aotexport_runtime.errors import BundleInvalid, Place
from aotexport_runtime.schema.kernels import Kernel, KernelCandidate, KernelLibrary, NumberParameter
from aotexport_runtime.validate.bounds import check_index, check_text, check_unique
from aotexport_runtime.validate.manifest import check_relative_path
from aotexport_runtime.values.sizes import INT64_MAX, check_size

MAX_PACK_NBYTES = 1 << 30
MAX_SHARED_NBYTES = 1 << 20
MAX_SCRATCH_NBYTES = 1 << 30
MAX_WARPS = 32
_DIGEST = re.compile(r"[0-9a-f]{64}")
_ARCHITECTURE = re.compile(r"sm_[1-9][0-9]{1,2}|ptx")
_INTEGERS = ("i1", "i8", "i16", "i32", "i64", "u8", "u16", "u32", "u64")


def check_kernels(library: KernelLibrary, *, where: str) -> None:
    """Refuse kernels with malformed names, grids over unknown arguments, or code outside of its pack.

    Raises:
        BundleInvalid: names the fault.
    """
    where = Place(where)
    check_text(library.compiler, "compiler", where.at("compiler"))
    check_unique([pack.architecture for pack in library.packs], "pack for", where.at("packs"))
    for index, pack in enumerate(library.packs):
        here = where.at("packs", index)
        _check_architecture(pack.architecture, here)
        check_relative_path(pack.file, here)
        check_index(pack.nbytes, MAX_PACK_NBYTES + 1, "size of a pack", here)
    check_unique([kernel.name for kernel in library.kernels], "kernel", where.at("kernels"))
    sizes = {pack.architecture: pack.nbytes for pack in library.packs}
    for index, kernel in enumerate(library.kernels):
        _check_kernel(kernel, sizes, where.at("kernels", index))


def _check_architecture(name: str, where: str) -> None:
    if not _ARCHITECTURE.fullmatch(name):
        raise BundleInvalid(f"{name[:80]!r} is no architecture", where=where, code="kernel-malformed")


def _check_identifier(name: str, where: str) -> None:
    if not (name.isidentifier() and name.isascii()) or len(name) > 200:
        raise BundleInvalid(
            f"{name[:80]!r} is no name of a kernel or of its argument", where=where, code="kernel-malformed"
        )


def _check_kernel(kernel: Kernel, packs: dict[str, int], where: Place) -> None:
    names = [*(parameter.name for parameter in kernel.parameters), *kernel.grid_arguments]
    for name in (kernel.name, *names):
        _check_identifier(name, where)
    check_unique(names, f"argument of `{kernel.name}`", where)
    if kernel.source is not None:
        check_relative_path(kernel.source, where)
    integers = set(kernel.grid_arguments)
    for parameter in kernel.parameters:
        multiple = parameter.multiple_of if isinstance(parameter, NumberParameter) else parameter.alignment
        if multiple < 1 or multiple & (multiple - 1) or multiple > 1 << 16:
            raise BundleInvalid(
                f"`{parameter.name}` of `{kernel.name}` is a multiple of {multiple}",
                where=where,
                code="kernel-malformed",
            )
        if isinstance(parameter, NumberParameter) and parameter.type in _INTEGERS:
            integers.add(parameter.name)
    for text in (*kernel.operators, *(text for line in kernel.lines for text in (line.file, line.function))):
        check_text(text, f"origin of `{kernel.name}`", where)
    if not kernel.candidates:
        raise BundleInvalid(f"kernel `{kernel.name}` has no candidate", where=where, code="kernel-malformed")
    for index, candidate in enumerate(kernel.candidates):
        _check_candidate(candidate, kernel, integers, packs, where.at("candidates", index))


def _check_candidate(
    candidate: KernelCandidate, kernel: Kernel, integers: set[str], packs: dict[str, int], where: str
) -> None:
    if not 1 <= candidate.num_warps <= MAX_WARPS:
        raise BundleInvalid(
            f"kernel `{kernel.name}` has {candidate.num_warps} warps", where=where, code="kernel-malformed"
        )
    for axis in candidate.grid:
        check_size(axis, integers, where=where)
    for constant in candidate.constants:
        _check_identifier(constant.name, where)
        if isinstance(constant.value, int) and abs(constant.value) > INT64_MAX:
            raise BundleInvalid(
                f"constant `{constant.name}` has more than 64 bits", where=where, code="kernel-malformed"
            )
    check_unique([binary.architecture for binary in candidate.binaries], f"code of `{kernel.name}` for", where)
    for binary in candidate.binaries:
        if binary.architecture not in packs:
            raise BundleInvalid(
                f"there is no pack for {binary.architecture[:80]!r}", where=where, code="reference-missing"
            )
        nbytes = packs[binary.architecture]
        if binary.offset < 0 or binary.nbytes < 1 or binary.offset + binary.nbytes > nbytes:
            raise BundleInvalid(
                f"code of `{kernel.name}` lies outside of its pack", where=where, code="kernel-malformed"
            )
        if not _DIGEST.fullmatch(binary.sha256):
            raise BundleInvalid(
                f"malformed digest of the code of `{kernel.name}`", where=where, code="kernel-malformed"
            )
        check_index(binary.shared_nbytes, MAX_SHARED_NBYTES, f"shared memory of `{kernel.name}`", where)
        check_index(binary.global_scratch_nbytes, MAX_SCRATCH_NBYTES, f"scratch memory of `{kernel.name}`", where)
        alignment = binary.global_scratch_alignment
        if alignment < 1 or alignment & (alignment - 1) or alignment > 1 << 12:
            raise BundleInvalid(
                f"alignment of the scratch memory of `{kernel.name}` is {alignment}",
                where=where,
                code="kernel-malformed",
            )
