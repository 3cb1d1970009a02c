"""A bundle on disk: opened, contained and checked. No torch. Only files of the manifest are read, after their size."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property, partial
from io import BufferedReader
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from aotexport_runtime.bundle.directory import MANIFEST_NAME, BundleDirectory, read_most
from aotexport_runtime.errors import ArgumentInvalid, BundleInvalid, Place
from aotexport_runtime.schema import versions
from aotexport_runtime.schema.bounded import Record
from aotexport_runtime.schema.codec import check_size_of, decode_record, refused
from aotexport_runtime.schema.graph import Graph
from aotexport_runtime.schema.limits import DEFAULT, Limits
from aotexport_runtime.schema.manifest import FileEntry, Manifest, VectorEntry
from aotexport_runtime.schema.program import Program
from aotexport_runtime.validate.graph import check_graph
from aotexport_runtime.validate.manifest import check_manifest
from aotexport_runtime.validate.program import check_forward_graph, check_functional_graph, check_program
from aotexport_runtime.values.arguments import path_of

if TYPE_CHECKING:
    from aotexport_runtime.schema.targets import CompiledProgram, KernelLibrary, LoweredProgram, Target
    from aotexport_runtime.schema.vectors import Vector

T = TypeVar("T", bound=Record)


def open_bundle(path: str | os.PathLike[str], *, check_digests: bool = True, limits: Limits = DEFAULT) -> Bundle:
    """Return the bundle in directory `path`, without torch; its programs and graphs are read when asked for.

    Args:
        path: directory that holds `bundle.json`.
        check_digests: compare the SHA-256 of every file with the manifest now. Sizes are always compared.
        limits: the most that the bundle may ask for.

    Raises:
        ArgumentInvalid: `path` is no path.
        BundleInvalid: not a bundle, broken, truncated, tampered with, or hostile.
        BundleTooNew: written for a newer runtime.
    """
    directory, data = read_manifest_bytes(path, limits)
    bundle = Bundle(directory, read_manifest(data, limits), limits, hashlib.sha256(data).hexdigest())
    bundle.check_files(digests=check_digests)
    return bundle


def read_manifest_bytes(path: str | os.PathLike[str], limits: Limits) -> tuple[BundleDirectory, bytes]:
    """Return the directory of a bundle, held open, and the bytes of its manifest; see `open_bundle`."""
    root = path_of("path", path)
    try:
        # Files are read from this directory, even if its path leads to another one by then.
        directory = BundleDirectory(root)
    except (FileNotFoundError, NotADirectoryError, ValueError):
        reason = f"`{path}` is a file, and a bundle is a directory" if root.is_file() else f"no directory `{path}`"
        raise BundleInvalid(reason, check="bundle-missing/directory") from None
    except OSError as error:
        raise BundleInvalid(f"`{path}` cannot be read: {error.strerror}", check="bundle-missing/directory") from None
    try:
        with directory.open(MANIFEST_NAME) as stream:
            data = read_most(stream, limits.json_nbytes)
    except BundleInvalid as error:
        if isinstance(error.__cause__, PermissionError):
            raise
        reason = f"`{path}` is no bundle: it has no file `{MANIFEST_NAME}`"
        raise BundleInvalid(reason, check="bundle-missing/manifest") from None
    _check_nbytes(MANIFEST_NAME, len(data), limits)
    return directory, data


def _check_nbytes(path: str, nbytes: int, limits: Limits) -> None:
    if nbytes > limits.json_nbytes:
        message = f"larger than the {limits.json_nbytes} bytes of JSON that are read"
        raise BundleInvalid(message, where=path, check="json-limit/bytes")


def read_manifest(data: bytes, limits: Limits = DEFAULT) -> Manifest:
    """Return the manifest in `data`: envelope, version gate, strict decode, then consistency; see `open_bundle`."""
    check_envelope(data, limits)
    manifest = decode_record(data, Manifest, where=MANIFEST_NAME, limits=limits)
    check_manifest(manifest, limits=limits)
    return manifest


def check_envelope(data: bytes, limits: Limits) -> None:
    """Refuse a manifest that is none, or of a version that this runtime does not read."""
    check_size_of(data, MANIFEST_NAME, limits)
    try:
        envelope = msgspec.json.decode(data, type=versions.Envelope)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise refused(error, MANIFEST_NAME, "not the manifest of a bundle: ") from None
    versions.check_readable(envelope)


class Bundle:
    """An open bundle.

    What reads a file raises `BundleInvalid` if the manifest does not list it, it is missing, no regular file inside the
    bundle, of another size, with holes in the place of data, or no longer the file whose digest was compared. Records
    are decoded and checked once; those that a record refers to are checked before it.

    Attributes:
        manifest_sha256: digest of the file that the manifest was read from.
        compared_by_readers: files whose digest was left to who reads them, since their bytes are then at hand.
    """

    def __init__(
        self, directory: BundleDirectory, manifest: Manifest, limits: Limits = DEFAULT, manifest_sha256: str = ""
    ) -> None:
        self.directory = directory
        self.manifest_sha256 = manifest_sha256
        self.manifest = manifest
        self.limits = limits
        self.compared_by_readers: frozenset[str] = frozenset()
        self._compared: dict[str, tuple[int, ...]] = {}
        self._checked: dict[str, Any] = {}

    @property
    def root(self) -> Path:
        """The bundle's directory when it was opened, absolute and without links; for messages."""
        return self.directory.path

    @cached_property
    def _entries(self) -> dict[str, FileEntry]:
        return {entry.path: entry for entry in self.manifest.files}

    def stream(self, path: str) -> BufferedReader:
        """Return a listed file, open to be read."""
        entry = self._entries.get(path)
        if entry is None:
            raise BundleInvalid("not listed in the manifest", where=path, check="file-unlisted/file")
        stream = self.directory.open(path)
        nbytes = os.fstat(stream.fileno()).st_size
        if nbytes == entry.nbytes and self._compared.get(path, _identity(stream)) == _identity(stream):
            return stream
        stream.close()
        message = _TAMPERED if nbytes == entry.nbytes else f"expected {entry.nbytes} bytes, got {nbytes}"
        raise BundleInvalid(message, where=path, check="file-differs/size")

    def file(self, path: str) -> Path:
        """Return the absolute path of a listed file."""
        self.stream(path).close()
        return self.directory.files / path

    def intact_file(self, path: str) -> Path:
        """Return the absolute path of a listed file, its digest compared now."""
        with self.stream(path) as stream:
            self.compare(path, stream)
        return self.directory.files / path

    def bytes_of(self, path: str) -> bytes:
        """Return the bytes of a listed file."""
        with self.stream(path) as stream:
            return stream.read(self._entries[path].nbytes)

    def read(self, path: str) -> bytes:
        """Return the bytes of a listed JSON file within the limits, their digest compared."""
        if path in self._entries:
            _check_nbytes(path, self._entries[path].nbytes, self.limits)
        data = self.bytes_of(path)
        self.compare_digest(path, hashlib.sha256(data).hexdigest())
        return data

    def check_files(self, *, digests: bool = True, read_later: Iterable[str] = ()) -> None:
        """Compare size and, if `digests`, SHA-256 of every listed file; the first that differs is refused.

        `read_later`: files to leave to their readers, see `compared_by_readers`.
        """
        self.compared_by_readers = frozenset(read_later if digests else ())
        for path in self._entries:
            with self.stream(path) as stream:
                if digests and path not in self.compared_by_readers:
                    self.compare(path, stream)

    @contextlib.contextmanager
    def files_checked(self) -> Generator[None, None, None]:
        """Call `check_files` in a thread while the block runs; what it raises comes before errors of the block."""
        with ThreadPoolExecutor(1, "aotexport digests") as pool:
            checked = pool.submit(self.check_files)
            try:
                yield
            finally:
                if error := checked.exception():
                    raise error from None

    def compare(self, path: str, stream: BufferedReader) -> None:
        """Refuse an open listed file of another digest; other files of the path are refused from then on."""
        # Each part waits for the interpreter, if this is not the main thread.
        digest, part = hashlib.sha256(), bytearray(min(self._entries[path].nbytes, 1 << 24) or 1)
        while count := stream.readinto(part):
            digest.update(memoryview(part)[:count])
        self.compare_digest(path, digest.hexdigest())
        self._compared[path] = _identity(stream)

    def compare_digest(self, path: str, digest: str) -> None:
        """Refuse a listed file whose SHA-256 is another one."""
        if digest != self._entries[path].sha256:
            raise BundleInvalid(_TAMPERED, where=path, check="file-differs/digest")

    def place(self, path: str) -> Place:
        """Return the place of a file, for errors."""
        return Place(path)

    def checked(self, path: str, type_: type[T], check: Callable[..., None]) -> T:
        """Return the record in a listed JSON file, which is read and checked once."""
        if path not in self._checked:
            record = decode_record(self.read(path), type_, where=path, limits=self.limits)
            check(record, where=self.place(path))
            self._checked[path] = record
        return self._checked[path]

    # --- programs -----------------------------------------------------------------------------------------

    @property
    def program_names(self) -> tuple[str, ...]:
        """Names of the programs, in order of preference."""
        return tuple(entry.name for entry in self.manifest.programs)

    def record_path(self, program: str) -> str:
        """Return the path of the record of a program."""
        return f"programs/{program}/program.json"

    def program(self, name: str) -> Program:
        """Return the record of program `name`; an unknown name is refused (`ArgumentInvalid`)."""
        if name not in self.program_names:
            raise ArgumentInvalid(f"no program {str(name)[:80]!r}; the bundle has {', '.join(self.program_names)}")
        return self.checked(self.record_path(name), Program, partial(check_program, manifest=self.manifest, name=name))

    def graph(self, program: str, file: str) -> Graph:
        """Return graph `file` of `program`."""
        check = partial(self._check_graph, program=self.program(program), file=file)
        return self.checked(f"programs/{program}/{file}", Graph, check)

    def read_graphs(self) -> list[Graph]:
        """Read and check every program, and return its graphs, which are kept."""
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
        """Return the record of a recorded call."""
        from aotexport_runtime.validate.vector import Vector, check_vector

        return self.checked(entry.record, Vector, partial(check_vector, program=self.program(entry.program)))

    # --- targets ------------------------------------------------------------------------------------------

    @property
    def target_names(self) -> tuple[str, ...]:
        """Names of the targets that the bundle has beside its graphs, sorted."""
        found = (re.fullmatch(r"targets/([^/]+)/target\.json", entry.path) for entry in self.manifest.files)
        return tuple(sorted(match[1] for match in found if match is not None))

    def target(self, name: str) -> Target:
        """Return the record of target `name`."""
        from aotexport_runtime.validate.targets import Target, check_target

        check = partial(check_target, manifest=self.manifest, name=name)
        return self.checked(f"targets/{name}/target.json", Target, check)

    def compiled(self, target: str, program: str) -> CompiledProgram | None:
        """Return the record of `program` compiled for `target`; None: there is none."""
        from aotexport_runtime.validate.targets import check_compiled

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
        """Return the record of `program` lowered for `target`."""
        from aotexport_runtime.validate.targets import LoweredProgram, check_lowered

        check = partial(check_lowered, program=self.program(program))
        return self.checked(f"targets/{target}/programs/{program}/lowered.json", LoweredProgram, check)

    def lowered_graph(self, target: str, program: str, *, backward: bool) -> Graph:
        """Return the forward or backward graph of `program` lowered for `target`."""
        from aotexport_runtime.validate.targets import check_lowered_graph

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
        """Return the kernels of `target`; their code is not read."""
        from aotexport_runtime.validate.targets import KernelLibrary, check_kernels

        return self.checked(f"targets/{target}/kernels/kernels.json", KernelLibrary, check_kernels)


def _identity(stream: BufferedReader) -> tuple[int, ...]:
    """Return what differs between two files, and between a file and itself after it was written to."""
    status = os.fstat(stream.fileno())
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


_TAMPERED = (
    "its SHA-256 differs from the manifest's: the file was changed or damaged after export. "
    "Copy the bundle again, or export it again"
)
