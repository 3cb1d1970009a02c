"""Kernels to machine code, in worker processes, with a cache by content; and to the files of the target."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from aotexport.lower.cuda.retarget import CannotLower
from aotexport.lower.cuda.sources import KernelSource
from aotexport.model.refusals import internal_error
from aotexport.model.source_lines import source_of
from aotexport_runtime.schema import encode_record
from aotexport_runtime.schema.targets import (
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

PTX_ARCHITECTURE = "sm_80"
"""Architecture whose PTX ships for newer devices than the compiled ones: PTX of later architectures is not portable."""

_PTX_VERSION = 80
"""Version of PTX that drivers for CUDA 12.0 and newer read."""

MAX_WORKERS = 8


@dataclass(frozen=True)
class Binary:
    """Machine code of one candidate of one kernel, the PTX that it was made from, and the memory that it needs."""

    code: bytes
    ptx: bytes
    shared_nbytes: int
    global_scratch_nbytes: int
    global_scratch_alignment: int


@dataclass(frozen=True)
class Job:
    """One compilation: a candidate of a kernel for an architecture."""

    kernel: str
    candidate: int
    architecture: str


@dataclass(frozen=True)
class Compiled:
    """Code per compilation, and reasons for those that failed."""

    binaries: dict[Job, Binary]
    failures: dict[Job, str]


def compiler_version() -> str:
    """Return the compiler's name and version."""
    return f"triton {metadata.version('triton')}"


def compile_kernels(
    kernels: Iterable[KernelSource],
    architectures: Iterable[str],
    *,
    cache: Path | None = None,
    progress: Callable[[int, int], None] = lambda done, count: None,
) -> Compiled:
    """Compile every candidate of every kernel for every architecture; a compilation may fail.

    Earlier results are read from `cache`, by default `kernels` in the user's cache directory. `progress` is called with
    the number of finished compilations and of all.
    """
    described = {
        Job(kernel.name, index, architecture): _description(kernel, index, architecture)
        for kernel in kernels
        for index in range(len(kernel.candidates))
        for architecture in architectures
    }
    directory = _cache_directory() if cache is None else cache
    directory.mkdir(parents=True, exist_ok=True)
    compiled = Compiled({}, {})
    waiting: queue.SimpleQueue[tuple[Job, dict[str, Any]]] = queue.SimpleQueue()
    for job, description in described.items():
        found = _cached(directory, description["key"])
        if found is not None:
            compiled.binaries[job] = found
        else:
            waiting.put((job, description))
    bugs: list[str] = []

    def work() -> None:
        for _ in _compile_waiting(waiting, directory, compiled, bugs):
            progress(len(compiled.binaries) + len(compiled.failures), len(described))

    count = min(waiting.qsize(), os.cpu_count() or 1, MAX_WORKERS)
    threads = [threading.Thread(target=work, daemon=True) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if bugs:
        error = RuntimeError(bugs[0])
        raise internal_error("compile kernels", error) from error
    return compiled


def _description(kernel: KernelSource, index: int, architecture: str) -> dict[str, Any]:
    candidate = kernel.candidates[index]
    options = dict(candidate.options)
    if architecture == PTX_ARCHITECTURE:
        options["ptx_version"] = _PTX_VERSION
    description: dict[str, Any] = {
        "name": kernel.name,
        "text": kernel.text,
        "signature": kernel.signature,
        "divisible": kernel.divisible,
        "constants": candidate.constants,
        "options": options,
        "architecture": architecture,
    }
    key = json.dumps([description, compiler_version(), metadata.version("torch")], sort_keys=True)
    return {**description, "key": hashlib.sha256(key.encode()).hexdigest()}


def _cache_directory() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "aotexport" / "kernels"


def _cached(directory: Path, key: str) -> Binary | None:
    record = directory / f"{key}.json"
    try:
        facts = json.loads(record.read_text())
        code, ptx = (directory / f"{key}.cubin").read_bytes(), (directory / f"{key}.ptx").read_bytes()
        # An interrupted writer leaves files that do not match.
        if hashlib.sha256(code + ptx).hexdigest() != facts["sha256"]:
            return None
    except (OSError, ValueError, KeyError):
        return None
    return Binary(code, ptx, facts["shared"], facts["global_scratch"], facts["global_scratch_align"])


def _compile_waiting(
    waiting: queue.SimpleQueue[tuple[Job, dict[str, Any]]], cache: Path, compiled: Compiled, bugs: list[str]
) -> Iterator[Job]:
    """Yield jobs that a process has compiled, or failed at; the process is replaced when it dies."""
    with tempfile.TemporaryDirectory(prefix="aotexport-kernels-") as scratch, contextlib.ExitStack() as stack:
        process = None
        while True:
            try:
                job, description = waiting.get_nowait()
            except queue.Empty:
                return
            if process is None:
                process = _start(Path(scratch))
                stack.callback(_stop, process)
            answer = _ask(process, description)
            if answer is None:
                compiled.failures[job] = f"the compiler's process died (exit code {process.wait()})"
                process = None
            elif "bug" in answer:
                bugs.append(f"{answer['error']}\n{answer['bug']}")
            elif "error" in answer:
                compiled.failures[job] = answer["error"]
            else:
                compiled.binaries[job] = _keep(Path(scratch), cache, description["key"], answer)
            yield job


def _keep(scratch: Path, cache: Path, key: str, facts: dict[str, Any]) -> Binary:
    code, ptx = (scratch / f"{key}.cubin").read_bytes(), (scratch / f"{key}.ptx").read_bytes()
    facts = {**facts, "sha256": hashlib.sha256(code + ptx).hexdigest()}
    contents = {"cubin": code, "ptx": ptx, "json": json.dumps(facts).encode()}
    for suffix, data in contents.items():
        with tempfile.NamedTemporaryFile(dir=cache, delete=False) as file:
            file.write(data)
        os.replace(file.name, cache / f"{key}.{suffix}")
    return Binary(code, ptx, facts["shared"], facts["global_scratch"], facts["global_scratch_align"])


def _start(scratch: Path) -> subprocess.Popen[str]:
    environment = {
        **os.environ,
        "TRITON_CACHE_DIR": str(scratch / "triton"),
        "TRITON_DISABLE_LINE_INFO": "1",
        "TRITON_INTERPRET": "0",
        # The default of Triton 3.9; later ones have another.
        "TRITON_DEFAULT_FP_FUSION": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
    }
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "aotexport.lower.cuda.worker", str(scratch)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=environment,
    )


def _ask(process: subprocess.Popen[str], description: dict[str, Any]) -> dict[str, Any] | None:
    """Return the answer of a worker; None: it died."""
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdin.write(json.dumps(description) + "\n")
        process.stdin.flush()
    except BrokenPipeError:
        return None
    line = process.stdout.readline()
    return json.loads(line) if line else None


def _stop(process: subprocess.Popen[str]) -> None:
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            with contextlib.suppress(OSError):
                stream.close()
    process.wait()


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
    """Return the record of a kernel's parameter; `CannotLower`: the format lacks its type."""
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
