"""A bundle on disk: opened, contained and checked. No torch.

Invariant: only files inside the bundle's directory that the manifest lists are read, and only after their sizes were
compared.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
from collections.abc import Callable, Generator, Iterable
from functools import cached_property, partial
from io import BufferedReader
from pathlib import Path
from typing import Any, TypeVar

from aotexport_runtime import schema
from aotexport_runtime.bundle.directory import BundleDirectory, at_descriptor
from aotexport_runtime.bundle.manifest import read_manifest, read_manifest_bytes
from aotexport_runtime.errors import ArgumentInvalid, BundleInvalid, Place
from aotexport_runtime.schema.base import Record
from aotexport_runtime.schema.graph import Graph
from aotexport_runtime.schema.kernels import KernelLibrary
from aotexport_runtime.schema.limits import DEFAULT, Limits
from aotexport_runtime.schema.manifest import FileEntry, Manifest, VectorEntry
from aotexport_runtime.schema.program import Program
from aotexport_runtime.schema.targets import CompiledProgram, LoweredProgram, Target
from aotexport_runtime.schema.vectors import Vector
from aotexport_runtime.validate import (
    check_compiled,
    check_forward_graph,
    check_functional_graph,
    check_graph,
    check_kernels,
    check_lowered,
    check_lowered_graph,
    check_program,
    check_target,
    check_vector,
)

T = TypeVar("T", bound=Record)


def open_bundle(path: str | os.PathLike[str], *, check_digests: bool = True, limits: Limits = DEFAULT) -> Bundle:
    """Open the bundle in directory `path` without torch.

    Args:
        path: directory that holds `bundle.json`.
        check_digests: compare the SHA-256 of every file with the manifest now. Sizes are always compared.
        limits: the most that the bundle may ask for.

    Returns:
        The opened bundle; its programs and graphs are read when asked for.

    Raises:
        ArgumentInvalid: `path` is no path.
        BundleInvalid: not a bundle, broken, truncated, tampered with, or hostile.
        BundleTooNew: written for a newer runtime.
    """
    directory, data = read_manifest_bytes(path, limits)
    bundle = Bundle(directory, read_manifest(data, limits), limits, hashlib.sha256(data).hexdigest())
    bundle.check_files(digests=check_digests)
    return bundle


class Bundle:
    """An open bundle.

    Attributes:
        directory: where it is, held open.
        manifest: its manifest, checked.
        limits: the most that it may ask for.
        manifest_sha256: digest of the file that the manifest was read from.
    """

    def __init__(
        self, directory: BundleDirectory, manifest: Manifest, limits: Limits = DEFAULT, manifest_sha256: str = ""
    ) -> None:
        self.directory = directory
        self.manifest_sha256 = manifest_sha256
        self.manifest = manifest
        self.limits = limits
        self._compared: dict[str, tuple[int, ...]] = {}
        self._compared_when_read: frozenset[str] = frozenset()
        self._checked: dict[str, Any] = {}

    @property
    def root(self) -> Path:
        """The bundle's directory when it was opened, absolute and without links; for messages."""
        return self.directory.path

    @cached_property
    def _entries(self) -> dict[str, FileEntry]:
        return {entry.path: entry for entry in self.manifest.files}

    def stream(self, path: str) -> BufferedReader:
        """Return a listed file, open to be read; a file whose digest was compared is that file, unchanged.

        Raises:
            BundleInvalid: not listed, missing, not a regular file inside the bundle, of another size, with holes in the
                place of data, or no longer the file whose digest was compared.
        """
        entry = self._entries.get(path)
        if entry is None:
            raise BundleInvalid("not listed in the manifest", where=path, check="file-unlisted/file")
        stream = self.directory.open(path)
        nbytes = os.fstat(stream.fileno()).st_size
        if nbytes == entry.nbytes and self._compared.get(path, _identity(stream)) == _identity(stream):
            return stream
        stream.close()
        message = TAMPERED if nbytes == entry.nbytes else f"expected {entry.nbytes} bytes, got {nbytes}"
        raise BundleInvalid(message, where=path, check="file-differs/size")

    def file(self, path: str) -> Path:
        """Return the absolute path of a listed file.

        Raises:
            BundleInvalid: see `stream`.
        """
        with self.stream(path):
            return self._place(path)

    def _place(self, path: str) -> Path:
        return self.directory.files.joinpath(*path.split("/"))

    def bytes_of(self, path: str) -> bytes:
        """Return the bytes of a listed file.

        Raises:
            BundleInvalid: see `stream`.
        """
        with self.stream(path) as stream:
            return stream.read(self._entries[path].nbytes)

    def read(self, path: str) -> bytes:
        """Return the bytes of a listed JSON file, their digest compared.

        Raises:
            BundleInvalid: see `stream`; or it is too large, or the digest differs.
        """
        entry = self._entries.get(path)
        if entry is not None and entry.nbytes > self.limits.json_nbytes:
            raise BundleInvalid(
                f"larger than the {self.limits.json_nbytes} bytes of JSON that are read",
                where=path,
                check="json-limit/bytes",
            )
        data = self.bytes_of(path)
        self._check_digest(path, hashlib.sha256(data).hexdigest())
        return data

    def record(self, path: str, type_: type[T]) -> T:
        """Return the record in a listed JSON file.

        Raises:
            BundleInvalid: see `read`; or the file is no such record.
        """
        return schema.decode_record(self.read(path), type_, where=path, limits=self.limits)

    def check_files(self, *, digests: bool = True, read_later: Iterable[str] = ()) -> None:
        """Compare size and (optionally) digest of every listed file.

        Args:
            digests: whether to compare digests.
            read_later: files whose digest `compare` takes when they are read, since their bytes are then at hand.

        Raises:
            BundleInvalid: names the first file that differs.
        """
        self._compared_when_read = frozenset(read_later if digests else ())
        for entry in self.manifest.files:
            with self.stream(entry.path) as stream:
                if not digests or entry.path in self._compared_when_read:
                    continue
                self._check_digest(entry.path, hashlib.file_digest(stream, "sha256").hexdigest())
                self._compared[entry.path] = _identity(stream)

    def intact_file(self, path: str) -> Path:
        """Return the absolute path of a listed file, its digest compared now.

        Raises:
            BundleInvalid: see `file`; or the digest differs.
        """
        with self.stream(path) as stream:
            self._check_digest(path, hashlib.file_digest(stream, "sha256").hexdigest())
        return self._place(path)

    @contextlib.contextmanager
    def opened(self, path: str) -> Generator[Path, None, None]:
        """Yield where a listed file is read while the block runs: the same file, whatever its path leads to meanwhile.

        Raises:
            BundleInvalid: see `stream`.
        """
        with self.stream(path) as stream:
            yield at_descriptor(stream.fileno(), self._place(path))

    def compares_when_read(self, path: str) -> bool:
        """Return whether the digest of a file was left to its reader."""
        return path in self._compared_when_read

    def compare(self, path: str, parts: Iterable[Any]) -> None:
        """Refuse the bytes of a file that was left to its reader, in parts, unless they have its digest.

        Raises:
            BundleInvalid: the digest differs.
        """
        if not self.compares_when_read(path):
            return
        digest = hashlib.sha256()
        for part in parts:
            digest.update(part)
        self._check_digest(path, digest.hexdigest())

    def _check_digest(self, path: str, found: str) -> None:
        if found != self._entries[path].sha256:
            raise BundleInvalid(TAMPERED, where=path, check="file-differs/digest")

    def place(self, path: str) -> Place:
        """Return the place of a file, for errors."""
        return Place(path)

    def checked(self, path: str, type_: type[T], check: Callable[..., None]) -> T:
        """Return the record in a listed JSON file, which is read and checked once.

        Raises:
            BundleInvalid: see `record`; or `check` refuses it.
        """
        if path not in self._checked:
            record = self.record(path, type_)
            check(record, where=self.place(path))
            self._checked[path] = record
        return self._checked[path]

    @property
    def program_names(self) -> tuple[str, ...]:
        """Names of the programs, in order of preference."""
        return tuple(entry.name for entry in self.manifest.programs)

    def record_path(self, program: str) -> str:
        """Return the path of the record of a program."""
        return f"programs/{program}/program.json"

    def program(self, name: str) -> Program:
        """Return the record of program `name`, checked.

        Raises:
            ArgumentInvalid: no such program.
            BundleInvalid: its record is invalid.
        """
        if name not in self.program_names:
            raise ArgumentInvalid(f"no program {str(name)[:80]!r}; the bundle has {', '.join(self.program_names)}")
        return self.checked(self.record_path(name), Program, partial(check_program, manifest=self.manifest, name=name))

    def graph(self, program: str, file: str) -> Graph:
        """Return graph `file` of `program`, checked.

        Raises:
            BundleInvalid: missing or invalid.
        """
        check = partial(self._check_graph, program=self.program(program), file=file)
        return self.checked(f"programs/{program}/{file}", Graph, check)

    def read_graphs(self) -> list[Graph]:
        """Read and check every program, and return its graphs, which are kept.

        Raises:
            BundleInvalid: one is missing or invalid.
        """
        programs = map(self.program, self.program_names)
        files = [(p.name, each.file) for p in programs for each in (p.forward, p.functional) if each is not None]
        return [self.graph(name, file) for name, file in files]

    def _check_graph(self, graph: Graph, program: Program, file: str, where: Place) -> None:
        faults, symbols = where.found, {dimension.symbol for dimension in program.dimensions}
        namespaces = set(self.manifest.requirements.operator_namespaces)
        is_cast = program.autocast is not None
        check_graph(graph, symbols, namespaces, where=where, limits=self.limits, is_cast=is_cast)
        if where.found == faults:
            self._check_interface(graph, program, file, where)

    def _check_interface(self, graph: Graph, program: Program, file: str, where: Place) -> None:
        if file == program.forward.file:
            check_forward_graph(graph, program, where=where)
        if program.functional is not None and file == program.functional.file:
            record = self.place(self.record_path(program.name))
            check_functional_graph(graph, program, program.functional, where=where, record=record)

    def vector(self, entry: VectorEntry) -> Vector:
        """Return the record of a recorded call, checked.

        Raises:
            BundleInvalid: it, or its program, is invalid.
        """
        return self.checked(entry.record, Vector, partial(check_vector, program=self.program(entry.program)))

    # --- targets ------------------------------------------------------------------------------------------

    @property
    def target_names(self) -> tuple[str, ...]:
        """Names of the targets that the bundle has beside its graphs, sorted."""
        found = (_TARGET.fullmatch(entry.path) for entry in self.manifest.files)
        return tuple(sorted(match[1] for match in found if match is not None))

    def target(self, name: str) -> Target:
        """Return the record of target `name`, checked.

        Raises:
            BundleInvalid: no such target, or its record is invalid.
        """
        check = partial(check_target, manifest=self.manifest, name=name)
        return self.checked(f"targets/{name}/target.json", Target, check)

    def compiled(self, target: str, program: str) -> CompiledProgram | None:
        """Return the record of `program` compiled for `target`, checked; None: there is none.

        Raises:
            BundleInvalid: no such target or program, or their records are invalid.
        """
        record = self.program(program)
        for index, found in enumerate(self.target(target).programs):
            if found.program == program:
                graph = None if record.functional is None else self.graph(program, record.functional.file)
                where = self.place(f"targets/{target}/target.json").at("programs", index)
                check_compiled(found, record, graph, where=where)
                return found
        return None

    def has_target(self, target: str, program: str) -> bool:
        """Return whether the bundle holds `program` lowered for `target`."""
        return any(entry.name == program and target in entry.targets for entry in self.manifest.programs)

    def lowered(self, target: str, program: str) -> LoweredProgram:
        """Return the record of `program` lowered for `target`, checked.

        Raises:
            BundleInvalid: there is none, or it is invalid.
        """
        check = partial(check_lowered, program=self.program(program))
        return self.checked(f"targets/{target}/programs/{program}/lowered.json", LoweredProgram, check)

    def lowered_graph(self, target: str, program: str, *, backward: bool) -> Graph:
        """Return the forward or backward graph of `program` lowered for `target`, checked.

        Raises:
            BundleInvalid: there is none, or it is invalid.
        """
        lowered = self.lowered(target, program)
        check = partial(
            check_lowered_graph,
            lowered=lowered,
            program=self.program(program),
            kernels={kernel.name: kernel for kernel in self.kernels(target).kernels},
            namespaces=self.manifest.requirements.operator_namespaces,
            backward=backward,
            limits=self.limits,
        )
        file = lowered.backward if backward else lowered.forward
        return self.checked(f"targets/{target}/programs/{program}/{file}", Graph, check)

    def kernels(self, target: str) -> KernelLibrary:
        """Return the kernels of `target`, checked; their code is not read.

        Raises:
            BundleInvalid: there are none, or their record is invalid.
        """
        return self.checked(f"targets/{target}/kernels/kernels.json", KernelLibrary, check_kernels)


def _identity(stream: BufferedReader) -> tuple[int, ...]:
    """Return what differs between two files, and between a file and itself after it was written to."""
    status = os.fstat(stream.fileno())
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


_TARGET = re.compile(r"targets/([^/]+)/target\.json")

TAMPERED = (
    "its SHA-256 differs from the manifest's: the file was changed or damaged after export. "
    "Copy the bundle again, or export it again"
)
