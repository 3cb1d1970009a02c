"""Kernels to the files of the target: their record, their code per architecture, and their sources."""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from aotexport.lower.cuda.compile import PTX_ARCHITECTURE, Compiled, Job, compiler_version
from aotexport.lower.cuda.retarget import CannotLower
from aotexport.lower.cuda.sources import KernelSource
from aotexport.model.source_lines import source_of
from aotexport_runtime.schema import encode_record
from aotexport_runtime.schema.kernels import (
    Kernel,
    KernelBinary,
    KernelCandidate,
    KernelConstant,
    KernelLibrary,
    KernelPack,
    KernelParameter,
    NumberParameter,
    PointerParameter,
)

PTX = "ptx"
DIVISOR = 16

_DTYPES: dict[str, str] = {
    "i1": "bool",
    "i8": "int8",
    "i16": "int16",
    "i32": "int32",
    "i64": "int64",
    "u8": "uint8",
    "u16": "uint16",
    "u32": "uint32",
    "u64": "uint64",
    "fp16": "float16",
    "bf16": "bfloat16",
    "fp32": "float32",
    "fp64": "float64",
    "fp8e4nv": "float8_e4m3fn",
    "fp8e5": "float8_e5m2",
    "fp8e4b8": "float8_e4m3fnuz",
    "fp8e5b16": "float8_e5m2fnuz",
}
"""Element types by the names that Triton gives them."""

_NUMBERS = ("i1", "i8", "i16", "i32", "i64", "u8", "u16", "u32", "u64", "fp16", "bf16", "fp32", "fp64")


@dataclass
class _Pack:
    data: bytearray
    found: dict[str, int]

    def add(self, code: bytes) -> tuple[int, str]:
        """Add code unless it is there; return where it begins, and its digest."""
        digest = hashlib.sha256(code).hexdigest()
        if digest not in self.found:
            self.found[digest] = len(self.data)
            self.data += code
        return self.found[digest], digest


def library_files(
    kernels: Iterable[KernelSource],
    compiled: Compiled,
    architectures: Sequence[str],
    *,
    sources: bool,
    root: Path | None = None,
) -> dict[str, bytes]:
    """Return the files of a target that hold its kernels, by name.

    `root` is the directory that source files of the user are relative to; without it, kernels do not record the user's
    lines.
    """
    ordered = sorted(kernels, key=lambda kernel: kernel.name)
    kinds = [*architectures, PTX] if PTX_ARCHITECTURE in architectures else list(architectures)
    packs = {kind: _Pack(bytearray(), {}) for kind in kinds}
    records = tuple(_kernel(kernel, compiled, packs, sources, root) for kernel in ordered)
    library = KernelLibrary(
        compiler=compiler_version(),
        packs=tuple(
            KernelPack(architecture=kind, file=f"{kind}.z", nbytes=len(pack.data)) for kind, pack in packs.items()
        ),
        kernels=records,
    )
    files = {"kernels.json": encode_record(library, indent=False)}
    files |= {f"{kind}.z": zlib.compress(bytes(pack.data), 9) for kind, pack in packs.items()}
    if sources:
        files |= {f"sources/{kernel.name}.py": kernel.text.encode() for kernel in ordered}
    return files


def _kernel(
    kernel: KernelSource, compiled: Compiled, packs: dict[str, _Pack], sources: bool, root: Path | None
) -> Kernel:
    lines = [] if root is None else [source_of(trace, root) for trace in kernel.stack_traces]
    return Kernel(
        name=kernel.name,
        source=f"sources/{kernel.name}.py" if sources else None,
        parameters=tuple(parameter_of(kernel, name) for name in kernel.arguments),
        grid_arguments=kernel.grid_arguments,
        candidates=tuple(_candidate(kernel, index, compiled, packs) for index in range(len(kernel.candidates))),
        operators=kernel.operators,
        lines=tuple(sorted({line for line in lines if line is not None}, key=lambda line: (line.file, line.line))),
    )


def parameter_of(kernel: KernelSource, name: str) -> KernelParameter:
    """Return the record of a kernel's parameter.

    Raises:
        CannotLower: the format lacks its type.
    """
    type_ = kernel.signature[name]
    multiple = DIVISOR if name in kernel.divisible else 1
    if type_.startswith("*") and type_.removeprefix("*") in _DTYPES:
        return PointerParameter(name=name, dtype=_DTYPES[type_.removeprefix("*")], alignment=multiple)  # type: ignore[arg-type]
    if type_ in _NUMBERS:
        return NumberParameter(name=name, type=type_, multiple_of=multiple)  # type: ignore[arg-type]
    raise CannotLower(f"kernel `{kernel.name}` has a parameter of type `{type_}`")


def _candidate(kernel: KernelSource, index: int, compiled: Compiled, packs: dict[str, _Pack]) -> KernelCandidate:
    candidate = kernel.candidates[index]
    return KernelCandidate(
        constants=tuple(KernelConstant(name=name, value=value) for name, value in sorted(candidate.constants.items())),
        num_warps=candidate.options["num_warps"],
        num_stages=candidate.options["num_stages"],
        grid=candidate.grid,
        cooperative=bool(candidate.options.get("launch_cooperative_grid")),
        binaries=tuple(_binaries(kernel, index, compiled, packs)),
    )


def _binaries(kernel: KernelSource, index: int, compiled: Compiled, packs: dict[str, _Pack]) -> Iterable[KernelBinary]:
    for kind, pack in packs.items():
        binary = compiled.binaries.get(Job(kernel.name, index, PTX_ARCHITECTURE if kind == PTX else kind))
        if binary is None:
            continue
        code = binary.ptx if kind == PTX else binary.code
        offset, digest = pack.add(code)
        yield KernelBinary(
            architecture=kind,
            offset=offset,
            nbytes=len(code),
            sha256=digest,
            shared_nbytes=binary.shared_nbytes,
            global_scratch_nbytes=binary.global_scratch_nbytes,
            global_scratch_alignment=binary.global_scratch_alignment,
        )
