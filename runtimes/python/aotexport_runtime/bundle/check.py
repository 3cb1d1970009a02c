"""Every fault of a bundle, for `python -m aotexport_runtime check`; what depends on a faulty document is not read."""

from __future__ import annotations

import contextlib
import importlib.util
import os
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, TypeVar

import msgspec
import safetensors

from aotexport_runtime.bundle.cast_programs import CastPrograms, cast_dtypes
from aotexport_runtime.bundle.packs import KERNELS, TARGET, code_of, unpacked
from aotexport_runtime.bundle.read import Bundle, check_envelope, read_manifest_bytes
from aotexport_runtime.errors import BundleInvalid, NotSupported, Place
from aotexport_runtime.schema.bounded import Record
from aotexport_runtime.schema.codec import decode_record
from aotexport_runtime.schema.faults import structure_faults
from aotexport_runtime.schema.graph import Graph
from aotexport_runtime.schema.limits import DEFAULT, Limits
from aotexport_runtime.schema.manifest import Manifest
from aotexport_runtime.schema.program import Program
from aotexport_runtime.schema.targets import LoweredProgram
from aotexport_runtime.validate.manifest import check_manifest, check_onnx
from aotexport_runtime.validate.vector import check_stored

T = TypeVar("T", bound=Record)


def faults_of(path: str | os.PathLike[str], *, limits: Limits = DEFAULT) -> list[BundleInvalid]:
    """Return every fault of the bundle in directory `path`, in the order of its files; empty: it is valid.

    `limits`: the most that it may ask for. What is no path is refused (`ArgumentInvalid`).
    """
    try:
        directory, data = read_manifest_bytes(path, limits)
        check_envelope(data, limits)
    except BundleInvalid as error:
        return [error]
    faults: list[BundleInvalid] = []
    with contextlib.suppress(_Faulty):
        place = Place("bundle.json", (), faults)
        manifest = _decoded(data, Manifest, place, limits)
        check_manifest(manifest, place, limits=limits)
        # Paths and names are not safe to follow before.
        if not faults:
            check = _Check(directory, manifest, limits)
            check.faults = faults
            check.run()
            for dtype in cast_dtypes(manifest):
                cast = _CastCheck(check, dtype)
                cast.faults = faults
                cast.programs_and_calls(sorted(cast.own))
    return faults


class _Faulty(Exception):
    """A document is faulty, which was noted; nothing that depends on it is looked at."""


class _Check(Bundle):
    """A bundle with a valid manifest, whose `faults`, also of others with the same files, are noted and not raised."""

    faults: list[BundleInvalid]

    def run(self) -> None:
        for path in self._entries:
            self.look(path, self.intact_file, path)
        self.programs_and_calls(self.program_names)
        for target in self.target_names:
            self.target_programs(target)
        for entry in self.manifest.programs:
            for target in entry.targets:
                if target not in ("portable", "onnx", *self.target_names) and self.sound(self.record_path(entry.name)):
                    self.lowered_program(target, entry.name)
        for index, model in enumerate(self.manifest.onnx):
            if self.sound(self.record_path(model.program)):
                with self.place("bundle.json").at("onnx", index) as here:
                    check_onnx(model, self.program(model.program), where=here)
        self.packs()
        self.weights()

    def place(self, path: str) -> Place:
        return Place(path, (), self.faults)

    def look(self, path: str, read: Callable[..., object], *arguments: Any, needs: Iterable[str] = ()) -> None:
        """Note a fault of a file that a function reads, unless one of the files that it needs is faulty."""
        if self.sound(*needs):
            with contextlib.suppress(_Faulty), self.place(path):
                read(*arguments)

    def sound(self, *paths: str) -> bool:
        return not any(fault.where in paths for fault in self.faults)

    def checked(self, path: str, type_: type[T], check: Callable[..., None]) -> T:
        if path not in self._checked and self.sound(path):
            with self.place(path) as here:
                self._checked[path] = _decoded(self.read(path), type_, here, self.limits)
                check(self._checked[path], where=here)
        if path not in self._checked:
            raise _Faulty
        return self._checked[path]

    def programs_and_calls(self, names: Iterable[str]) -> None:
        for name in names:
            record = self.record_path(name)
            self.look(record, self.program, name)
            program: Program | None = self._checked.get(record)
            for graph in () if program is None else filter(None, (program.forward, program.functional)):
                path = f"programs/{name}/{graph.file}"
                # A faulty record may name what is nowhere.
                if self.sound(record) or path in self._entries:
                    self.look(path, self.graph, name, graph.file)
        for index, entry in enumerate(self.manifest.testvectors):
            record = self.record_path(entry.program)
            self.look(entry.record, self.vector, entry, needs=[record])
            self.look("bundle.json", self.stored, index, needs=[record, entry.record])

    def _check_interface(self, graph: Graph, program: Program, file: str, where: Place) -> None:
        if self.sound(self.record_path(program.name)):
            super()._check_interface(graph, program, file, where)

    def target_programs(self, target: str) -> None:
        path = f"targets/{target}/target.json"
        self.look(path, self.target, target)
        for name in self.program_names:
            self.look(path, self.compiled, target, name, needs=[path, self.record_path(name)])

    def lowered_program(self, target: str, name: str) -> None:
        kernels, record = f"targets/{target}/kernels/kernels.json", f"targets/{target}/programs/{name}/lowered.json"
        self.look(kernels, self.kernels, target)
        self.look(record, self.lowered, target, name)
        lowered: LoweredProgram | None = self._checked.get(record)
        for backward, file in enumerate(() if lowered is None else (lowered.forward, lowered.backward)):
            if file is not None:
                read = partial(self.lowered_graph, target, name, backward=bool(backward))
                self.look(f"targets/{target}/programs/{name}/{file}", read, needs=[kernels, record])

    def stored(self, index: int) -> None:
        entry = self.manifest.testvectors[index]
        with self.place("bundle.json").at("testvectors", index) as here:
            try:
                tensors = safetensors.deserialize(self.bytes_of(entry.tensors))
            except safetensors.SafetensorError as error:
                raise here.invalid(f"not a safetensors file: {error}", "tensor-stored/safetensors") from None
            shapes = {key: each["shape"] for key, each in tensors}
            check_stored(self.vector(entry), shapes, self.place(entry.record))

    def packs(self) -> None:
        if KERNELS not in self._entries or not self.sound(KERNELS):
            return
        library, where = self.kernels(TARGET), self.place(str(KERNELS))
        for pack in library.packs:
            with where:
                code = unpacked(self, pack.architecture)
                for i, kernel in enumerate(library.kernels):
                    for j, candidate in enumerate(kernel.candidates):
                        for k, binary in enumerate(candidate.binaries):
                            if binary.architecture == pack.architecture:
                                here = where.at("kernels", i, "candidates", j, "binaries", k)
                                code_of(binary, code, here)

    def weights(self) -> None:
        """Compare stored tensors with their records, where torch is installed, which reads them."""
        if importlib.util.find_spec("torch") is None:
            return
        from aotexport_runtime.bundle.weights import load_parts, parts_of

        broken = {str(fault.where) for fault in self.faults}
        for index, entry in enumerate(self.manifest.state):
            for part in parts_of(entry):
                # A dtype that this torch lacks is no fault of the bundle.
                with contextlib.suppress(NotSupported), self.place("bundle.json").at("state", index) as here:
                    try:
                        load_parts(self, [part] if part.file not in broken else [], mapped=True)
                    except BundleInvalid as error:
                        if error.check == "tensor-stored/safetensors":
                            broken.add(part.file)
                        raise here.invalid(str(error), error.check) from None


class _CastCheck(_Check, CastPrograms):
    """The programs that the bundle holds of a cast model."""


def _decoded(data: bytes, type_: type[T], where: Place, limits: Limits) -> T:
    """Return a record; note what is wrong with its structure."""
    try:
        return decode_record(data, type_, where=where, limits=limits)
    except BundleInvalid as error:
        is_json = error.code == "json-record"
        found = structure_faults(msgspec.json.decode(data), type_, Place(str(where))) if is_json else []
        assert where.faults is not None
        where.faults.extend(found or [error])
        raise _Faulty from None
