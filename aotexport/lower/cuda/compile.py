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
import zlib
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from aotexport.lower.cuda.retarget import CannotLower
from aotexport.lower.cuda.sources import KernelSource
from aotexport.model.refusals import internal_error
from aotexport.model.source_lines import source_of
from aotexport_runtime.schema.codec import encode_record
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
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    directory = home / "aotexport" / "kernels" if cache is None else cache
    directory.mkdir(parents=True, exist_ok=True)
    cached = {job: _cached(directory, each["key"]) for job, each in described.items()}
    compiled = Compiled({job: binary for job, binary in cached.items() if binary is not None}, {})
    waiting = {job: description for job, description in described.items() if job not in compiled.binaries}
    with contextlib.ExitStack() as stack:
        scratch = stack.enter_context(tempfile.TemporaryDirectory(prefix="aotexport-kernels-"))
        workers = _Workers(Path(scratch), directory)
        stack.callback(workers.stop)
        pool = ThreadPoolExecutor(min(os.cpu_count() or 1, MAX_WORKERS))
        stack.callback(pool.shutdown, cancel_futures=True)
        asked = {pool.submit(workers.ask, description): job for job, description in waiting.items()}
        for each in as_completed(asked):
            job, answer = asked[each], each.result()
            if "bug" in answer:
                error = RuntimeError(f"{answer['error']}\n{answer['bug']}")
                raise internal_error("compile kernels", error) from error
            binary = None if "error" in answer else _cached(directory, described[job]["key"])
            if binary is None:
                compiled.failures[job] = answer.get("error", "the cache has lost its code")
            else:
                compiled.binaries[job] = binary
            progress(len(compiled.binaries) + len(compiled.failures), len(described))
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


def _cached(directory: Path, key: str) -> Binary | None:
    """Return what a worker has written under a key; None: nothing, or a damaged file."""
    try:
        head, _, both = (directory / key).read_bytes().partition(b"\n")
        facts = json.loads(head)
        if hashlib.sha256(both).hexdigest() != facts.pop("sha256"):
            return None
        count = facts.pop("code_nbytes")
        return Binary(code=both[:count], ptx=both[count:], **facts)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


class _Workers:
    """Processes that compile, started where none is idle; one that dies costs its job alone."""

    def __init__(self, scratch: Path, cache: Path) -> None:
        self._scratch, self._cache = scratch, cache
        self._idle: queue.SimpleQueue[subprocess.Popen[str]] = queue.SimpleQueue()

    def ask(self, description: dict[str, Any]) -> dict[str, Any]:
        """Return the answer to a job."""
        try:
            process = self._idle.get_nowait()
        except queue.Empty:
            process = self._start()
        assert process.stdin is not None
        assert process.stdout is not None
        line = ""
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(json.dumps(description) + "\n")
            process.stdin.flush()
            line = process.stdout.readline()
        if not line:
            process.communicate()
            return {"error": f"the compiler's process died (exit code {process.returncode})"}
        self._idle.put(process)
        return json.loads(line)

    def stop(self) -> None:
        while not self._idle.empty():
            self._idle.get().communicate()

    def _start(self) -> subprocess.Popen[str]:
        environment = {
            **os.environ,
            "TRITON_CACHE_DIR": str(self._scratch / "triton"),
            "TRITON_DISABLE_LINE_INFO": "1",
            "TRITON_INTERPRET": "0",
            # The default of Triton 3.9; later ones have another.
            "TRITON_DEFAULT_FP_FUSION": "1",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        }
        return subprocess.Popen(
            [sys.executable, "-P", "-m", "aotexport.lower.cuda.worker", str(self._scratch), str(self._cache)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=environment,
        )


PTX = "ptx"
DIVISOR = 16

_SIZES = {"i": ("int", (8, 16, 32, 64)), "u": ("uint", (8, 16, 32, 64)), "fp": ("float", (16, 32, 64))}
_NUMBERS = {f"{short}{nbits}": f"{name}{nbits}" for short, (name, sizes) in _SIZES.items() for nbits in sizes}
_NUMBERS |= {"i1": "bool", "bf16": "bfloat16"}
_DTYPES = {**_NUMBERS, "fp8e4nv": "float8_e4m3fn", "fp8e5": "float8_e5m2"}
"""Element types by the names that Triton gives them."""


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
    kernels: Iterable[KernelSource], compiled: Compiled, architectures: Sequence[str], root: Path | None = None
) -> dict[str, bytes]:
    """Return the files of a target that hold its kernels, by name.

    `root` is the directory that source files of the user are relative to; without it, kernels do not record the user's
    lines.
    """
    ordered = sorted(kernels, key=lambda kernel: kernel.name)
    kinds = [*architectures, PTX] if PTX_ARCHITECTURE in architectures else list(architectures)
    packs = {kind: _Pack(bytearray(), {}) for kind in kinds}
    records = tuple(_kernel(kernel, compiled, packs, root) for kernel in ordered)
    library = KernelLibrary(
        compiler=compiler_version(),
        packs=tuple(
            KernelPack(architecture=kind, file=f"{kind}.z", nbytes=len(pack.data)) for kind, pack in packs.items()
        ),
        kernels=records,
    )
    files = {"kernels.json": encode_record(library, indent=False)}
    files |= {f"{kind}.z": zlib.compress(bytes(pack.data), 9) for kind, pack in packs.items()}
    return files | {f"sources/{kernel.name}.py": kernel.text.encode() for kernel in ordered}


def _kernel(kernel: KernelSource, compiled: Compiled, packs: dict[str, _Pack], root: Path | None) -> Kernel:
    lines = [] if root is None else [source_of(trace, root) for trace in kernel.stack_traces]
    return Kernel(
        name=kernel.name,
        source=f"sources/{kernel.name}.py",
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
