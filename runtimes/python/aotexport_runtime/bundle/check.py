"""Every fault of a bundle, not only the first: what `python -m aotexport_runtime check` prints. Nothing of it runs.

A document that is no record of its type is not looked into further, and neither is what depends on a faulty one.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterable, Iterator
from typing import TypeVar

import msgspec
import safetensors

from aotexport_runtime.bundle.cast_programs import CastPrograms, cast_dtypes
from aotexport_runtime.bundle.manifest import read_envelope, read_manifest_bytes
from aotexport_runtime.bundle.packs import KERNELS, TARGET, code_of, unpacked
from aotexport_runtime.bundle.read import Bundle
from aotexport_runtime.errors import BundleInvalid, NotSupported, Place
from aotexport_runtime.schema.base import Record
from aotexport_runtime.schema.codec import decode_record
from aotexport_runtime.schema.compiled import Target
from aotexport_runtime.schema.faults import structure_faults
from aotexport_runtime.schema.graph import Graph
from aotexport_runtime.schema.kernels import KernelBinary, KernelLibrary
from aotexport_runtime.schema.limits import DEFAULT, Limits
from aotexport_runtime.schema.manifest import Manifest
from aotexport_runtime.schema.program import Program
from aotexport_runtime.schema.targets import LoweredProgram
from aotexport_runtime.schema.vectors import Vector
from aotexport_runtime.schema.versions import pending
from aotexport_runtime.validate import (
    check_compiled,
    check_forward_graph,
    check_functional_graph,
    check_graph,
    check_kernels,
    check_lowered,
    check_lowered_graph,
    check_manifest,
    check_onnx,
    check_program,
    check_stored,
    check_target,
    check_vector,
)

T = TypeVar("T", bound=Record)


def faults_of(path: str | os.PathLike[str], *, limits: Limits = DEFAULT) -> list[BundleInvalid]:
    """Return every fault of the bundle in directory `path`, in the order of its files; empty: it is valid.

    Args:
        path: directory that holds `bundle.json`.
        limits: the most that the bundle may ask for.

    Raises:
        ArgumentInvalid: `path` is no path.
    """
    try:
        directory, data = read_manifest_bytes(path, limits)
        written = read_envelope(data, limits)
    except BundleInvalid as error:
        return [error]
    faults: list[BundleInvalid] = []
    manifest = _decoded(data, Manifest, "bundle.json", written, limits, faults)
    if manifest is not None:
        check_manifest(manifest, Place("bundle.json", (), faults), limits=limits)
    # Paths and names are not safe to follow before.
    if manifest is not None and not faults:
        bundle = Bundle(directory, manifest, limits)
        _Check(bundle, faults).run()
        for dtype in cast_dtypes(manifest):
            cast = CastPrograms(bundle, dtype)
            _Check(cast, faults).programs_and_calls(sorted(cast.own))
    return faults


def _decoded(
    data: bytes, type_: type[T], where: str, written: tuple[int, int], limits: Limits, faults: list[BundleInvalid]
) -> T | None:
    """Return a record, or None after its faults were noted."""
    try:
        return decode_record(data, type_, where=where, written=written, limits=limits)
    except BundleInvalid as error:
        plain = error.code == "json-record" and not pending(type_.__name__, written)
        found = structure_faults(msgspec.json.decode(data), type_, Place(where)) if plain else []
        faults += found or [error]
        return None


class _Check:
    """The documents of one bundle with a valid manifest."""

    def __init__(self, bundle: Bundle, faults: list[BundleInvalid]) -> None:
        self.bundle = bundle
        self.faults = faults
        self.programs: dict[str, Program] = {}
        self.graphs: dict[tuple[str, str], Graph] = {}
        self.namespaces = set(bundle.manifest.requirements.operator_namespaces)

    def run(self) -> None:
        for entry in self.bundle.manifest.files:
            with self.place(entry.path):
                self.bundle.intact_file(entry.path)
        self.programs_and_calls(self.bundle.program_names)
        for target in self.bundle.target_names:
            self.target(target)
        for entry in self.bundle.manifest.programs:
            for target in entry.targets:
                if entry.name in self.programs and target not in ("portable", "onnx", *self.bundle.target_names):
                    self.lowered(target, self.programs[entry.name])
        for index, model in enumerate(self.bundle.manifest.onnx):
            if model.program in self.programs:
                with self.place("bundle.json").at("onnx", index) as here:
                    check_onnx(model, self.programs[model.program], where=here)
        self.packs()
        self.weights()

    def programs_and_calls(self, names: Iterable[str]) -> None:
        for name in names:
            self.program(name)
        for index, entry in enumerate(self.bundle.manifest.testvectors):
            vector = self.document(entry.record, Vector)
            if vector is not None and entry.program in self.programs:
                faults = len(self.faults)
                check_vector(vector, self.programs[entry.program], where=self.place(entry.record))
                if len(self.faults) == faults:
                    self.stored(vector, index)

    def place(self, path: str) -> Place:
        return Place(path, (), self.faults)

    def broken(self, path: str) -> bool:
        """Return whether a file has a fault."""
        return any(fault.where == path for fault in self.faults)

    def document(self, path: str, type_: type[T]) -> T | None:
        """Return a record of the bundle; None: it is not there, or faulty, which was noted."""
        if self.broken(path):
            return None
        with self.place(path):
            written = self.bundle.written
            return _decoded(self.bundle.read(path), type_, path, written, self.bundle.limits, self.faults)
        return None

    def program(self, name: str) -> None:
        path, before = self.bundle.record_path(name), len(self.faults)
        program = self.document(path, Program)
        if program is None:
            return
        check_program(program, self.bundle.manifest, name=name, where=self.place(path))
        if len(self.faults) == before:
            self.programs[name] = program
        listed = {entry.path for entry in self.bundle.manifest.files}
        functional = program.functional
        for file in [program.forward.file] + ([] if functional is None else [functional.file]):
            # A faulty record may name what is nowhere.
            if name in self.programs or f"programs/{name}/{file}" in listed:
                self.graph(name, program, file)

    def graph(self, name: str, program: Program, file: str) -> None:
        path, before = f"programs/{name}/{file}", len(self.faults)
        graph = self.document(path, Graph)
        if graph is None:
            return
        symbols = {dimension.symbol for dimension in program.dimensions}
        place = self.place(path)
        is_cast = program.autocast is not None
        check_graph(graph, symbols, self.namespaces, where=place, limits=self.bundle.limits, is_cast=is_cast)
        if name not in self.programs or len(self.faults) > before:
            return
        self.graphs[name, file] = graph
        if file == program.forward.file:
            check_forward_graph(graph, program, where=place)
        elif program.functional is not None:
            record = self.place(self.bundle.record_path(name))
            check_functional_graph(graph, program, program.functional, where=place, record=record)

    def target(self, name: str) -> None:
        path = f"targets/{name}/target.json"
        target = self.document(path, Target)
        if target is None:
            return
        with self.place(path) as here:
            check_target(target, self.bundle.manifest, name=name, where=here)
        for index, compiled in enumerate(() if self.broken(path) else target.programs):
            program = self.programs.get(compiled.program)
            if program is not None:
                graph = program.functional and self.graphs.get((program.name, program.functional.file))
                with self.place(path).at("programs", index) as here:
                    check_compiled(compiled, program, graph, where=here)

    def lowered(self, target: str, program: Program) -> None:
        folder = f"targets/{target}/programs/{program.name}"
        library = self.document(f"targets/{target}/kernels/kernels.json", KernelLibrary)
        record, before = self.document(f"{folder}/lowered.json", LoweredProgram), len(self.faults)
        if record is None or library is None:
            return
        with self.place(f"targets/{target}/kernels/kernels.json") as here:
            check_kernels(library, where=here)
        with self.place(f"{folder}/lowered.json") as here:
            check_lowered(record, program, where=here)
        if len(self.faults) > before:
            return
        kernels = {kernel.name: kernel for kernel in library.kernels}
        for file in (record.forward, record.backward):
            graph = None if file is None else self.document(f"{folder}/{file}", Graph)
            if graph is None:
                continue
            with self.place(f"{folder}/{file}") as here:
                check_lowered_graph(
                    graph,
                    record,
                    program,
                    kernels,
                    self.namespaces,
                    backward=file == record.backward,
                    where=here,
                    limits=self.bundle.limits,
                )

    def stored(self, vector: Vector, index: int) -> None:
        """Compare the stored tensors of a recorded call with its record."""
        entry = self.bundle.manifest.testvectors[index]
        with self.place("bundle.json").at("testvectors", index) as here:
            try:
                tensors = safetensors.deserialize(self.bundle.bytes_of(entry.tensors))
            except safetensors.SafetensorError as error:
                raise here.invalid(f"not a safetensors file: {error}", "tensor-stored/safetensors") from None
            check_stored(vector, {key: each["shape"] for key, each in tensors}, self.place(entry.record))

    def packs(self) -> None:
        """Compare the compiled code of kernels with their record."""
        if KERNELS not in {entry.path for entry in self.bundle.manifest.files} or self.broken(KERNELS):
            return
        library, where = self.bundle.kernels(TARGET), self.place(str(KERNELS))
        for pack in library.packs:
            with where:
                code = unpacked(self.bundle, pack.architecture)
                for steps, binary in _binaries(library):
                    if binary.architecture == pack.architecture:
                        code_of(binary, code, where.at(*steps))

    def weights(self) -> None:
        """Compare stored tensors with their records, where torch is installed, which reads them."""
        if importlib.util.find_spec("torch") is None:
            return
        from aotexport_runtime.bundle.weights import load_parts, parts_of

        broken = {fault.where for fault in self.faults}
        for index, entry in enumerate(self.bundle.manifest.state):
            for part in parts_of(entry):
                if part.file not in broken:
                    try:
                        load_parts(self.bundle, [part], mapped=True)
                    except BundleInvalid as error:
                        if error.check == "tensor-stored/safetensors":
                            broken.add(part.file)
                        place = Place("bundle.json").at("state", index)
                        self.faults.append(BundleInvalid(str(error), where=place, check=error.check))
                    except NotSupported:
                        # A dtype that this torch lacks is no fault of the bundle.
                        continue


def _binaries(library: KernelLibrary) -> Iterator[tuple[tuple[str | int, ...], KernelBinary]]:
    """Yield the compiled code of all kernels, each with its path in the record."""
    for i, kernel in enumerate(library.kernels):
        for j, candidate in enumerate(kernel.candidates):
            for k, binary in enumerate(candidate.binaries):
                yield ("kernels", i, "candidates", j, "binaries", k), binary
