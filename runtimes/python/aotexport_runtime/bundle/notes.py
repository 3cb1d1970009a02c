"""The notes of a bundle in one list: notes of its programs, and packages that a load needs. No torch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from aotexport_runtime.bundle.read import Bundle
from aotexport_runtime.schema.graph import SourceLine
from aotexport_runtime.schema.manifest import Manifest
from aotexport_runtime.schema.program import Note, Program

_ORDER = ("number", "branch", "size", "integer", "package", "other")
LOUD = ("number", "branch")
"""Kinds of notes on reasons why calls like the example may fail."""


class BundleNote(NamedTuple):
    """A `Note` with the names of its programs; none: it is of the whole bundle. Of kind `package`: a load needs one."""

    kind: str
    programs: tuple[str, ...]
    text: str
    fixed: str | None = None
    outside: str | None = None
    source: SourceLine | None = None

    def __str__(self) -> str:
        """Return it as a sentence: the user's line, its text, the effect on a call outside of it."""
        line = self.source
        where = "" if line is None else f"{line.file}:{line.line} in {line.function}: "
        outside = "" if self.outside is None else f". {self.outside[:1].upper()}{self.outside[1:]}"
        return f"{where}{self.text}{outside}"

    def shown(self) -> str:
        """Return it as a line of a list, with its programs if its sentence does not name them."""
        of = f" ({', '.join(self.programs)})" if self.programs and self.kind != "other" else ""
        return f"{'fixed' if self.kind in LOUD else 'note'}{of}: {self}"

    def as_json(self) -> dict[str, Any]:
        """Return it as plain data."""
        line = self.source
        source = None if line is None else {"file": line.file, "line": line.line, "function": line.function}
        return {**self._asdict(), "programs": list(self.programs), "source": source, "sentence": self.shown()}


def notes_of(bundle: Bundle, program: str | None = None) -> list[BundleNote]:
    """Return the notes of an open bundle; of a program alone: its own, and those of the whole bundle."""
    names = bundle.program_names if program is None else [program]
    return listed(bundle.manifest, map(bundle.program, names))


def listed(manifest: Manifest, programs: Iterable[Program]) -> list[BundleNote]:
    """Return the notes of some programs of a bundle, a note of several programs once, and those of the bundle."""
    found: dict[Note, list[str]] = {}
    for program in programs:
        for note in program.notes:
            found.setdefault(note, []).append(program.name)
    notes = [BundleNote(n.kind, tuple(of), n.text, n.fixed, n.outside, n.source) for n, of in found.items()]
    needs = manifest.requirements
    names, types = (", ".join(f"`{n}`" for n in each) for each in (needs.operator_namespaces, needs.tensor_types))
    if names:
        text = (
            f"the bundle calls custom operators of {names}: import what registers them before `load`, and give their "
        )
        notes.append(BundleNote("package", (), f"{text}names as operator_namespaces"))
    if types:
        notes.append(BundleNote("package", (), f"the bundle makes tensors of {types}: give `load` the tensor_types"))
    return sorted(notes, key=lambda note: _ORDER.index(note.kind))
