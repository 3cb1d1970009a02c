"""Rules of kernels: names, packs, and compiled code within the packs."""

from __future__ import annotations

from aotexport_runtime.errors import Place
from aotexport_runtime.schema.bounded import Line
from aotexport_runtime.schema.kernels import Kernel, KernelCandidate, KernelLibrary, NumberParameter
from aotexport_runtime.validate.bounds import check_form, check_unique
from aotexport_runtime.validate.declared import check_declared
from aotexport_runtime.values.sizes import INT64_MAX, check_size

_INTEGERS = ("i1", "i8", "i16", "i32", "i64", "u8", "u16", "u32", "u64")


def check_kernels(library: KernelLibrary, *, where: Place) -> None:
    """Refuse kernels with malformed names, grids over unknown arguments, or code outside of its pack.

    Raises:
        BundleInvalid: names the fault.
    """
    faults = where.found
    check_declared(library, where)
    if where.found > faults:
        return
    sizes = {pack.architecture: pack.nbytes for pack in library.packs}
    for index, kernel in enumerate(library.kernels):
        with where.at("kernels", index) as here:
            _check_kernel(kernel, sizes, here)


def _check_kernel(kernel: Kernel, packs: dict[str, int], where: Place) -> None:
    names = [*(parameter.name for parameter in kernel.parameters), *kernel.grid_arguments]
    check_unique(names, f"argument of `{kernel.name}`", "name-twice/kernel-argument", where)
    integers = set(kernel.grid_arguments)
    for parameter in kernel.parameters:
        multiple = parameter.multiple_of if isinstance(parameter, NumberParameter) else parameter.alignment
        _check_power_of_two(multiple, f"alignment of `{parameter.name}` of `{kernel.name}`", where)
        if isinstance(parameter, NumberParameter) and parameter.type in _INTEGERS:
            integers.add(parameter.name)
    for text in (text for line in kernel.lines for text in (line.file, line.function)):
        check_form(text, Line, f"origin of `{kernel.name}`", "text-malformed/kernel-line", where)
    for index, candidate in enumerate(kernel.candidates):
        with where.at("candidates", index) as here:
            _check_candidate(candidate, kernel, integers, packs, here)


def _check_power_of_two(number: int, subject: str, where: Place) -> None:
    if number & (number - 1):
        raise where.invalid(f"{subject} is {number}, no power of two", "kernel-malformed/power-of-two")


def _check_candidate(
    candidate: KernelCandidate, kernel: Kernel, integers: set[str], packs: dict[str, int], where: Place
) -> None:
    for axis in candidate.grid:
        check_size(axis, integers, where=where)
    for constant in candidate.constants:
        if isinstance(constant.value, int) and abs(constant.value) > INT64_MAX:
            raise where.invalid(f"constant `{constant.name}` has more than 64 bits", "kernel-malformed/constant")
    for binary in candidate.binaries:
        if binary.offset + binary.nbytes > packs[binary.architecture]:
            raise where.invalid(f"code of `{kernel.name}` lies outside of its pack", "kernel-malformed/pack")
        _check_power_of_two(
            binary.global_scratch_alignment, f"alignment of the scratch memory of `{kernel.name}`", where
        )
