"""`KeptExports`: what the command line asks for, a bundle that was written before, and keeps, one that is new."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from aotexport.cache.digests import NotDigestible
from aotexport.cache.entries import Damaged, Entries, Entry
from aotexport.cache.files import changed, states, written_since
from aotexport.cache.key import key_of
from aotexport.errors import OutputExists
from aotexport.process.opened_files import OpenedFiles
from aotexport_runtime.bundle.staging import staged


class KeptExports:
    """The exports that are kept, for one export.

    Attributes:
        remarks: sentences on why this export is not found or not kept.
    """

    def __init__(self, entries: Entries, opened: OpenedFiles) -> None:
        self._entries, self._opened = entries, opened
        self._key: str | None = None
        self._root = Path()
        self.remarks: list[str] = []

    def find(self, source: Any, options: Any) -> Entry | None:
        """Return the entry of an export with all that it reads as it was then; None: there is none.

        Args:
            source: the model, its example calls and further records, by name, and the directory of its code, `root`.
            options: all that says something about the bundle, by name.
        """
        self._root = source.root
        if options.targets.cuda:
            self.remarks.append("exports with kernels for GPUs are not kept")
            return None
        try:
            self._key = key_of(_said(source, _UNREAD_OF_SOURCES) | _said(options, _UNREAD_OF_OPTIONS), self._root)
            entry = self._entries.find(self._key)
        except NotDigestible as reason:
            self.remarks.append(f"not kept: the model, its code or its arguments hold {reason}")
            return None
        except Damaged:
            self._forget()
            return None
        if entry is None:
            return None
        files, since_ns = entry.kept["files"], self._opened.since_ns
        if other := changed(files, self._root) or written_since(files, self._root, since_ns):
            self.remarks.append(f"exported anew: `{other}` has changed")
            return None
        return entry

    def write(self, entry: Entry, output: Path, *, force: bool) -> bool:
        """Write the bundle of an entry as an export does; return whether it was whole.

        Raises:
            NotWritten: the file system is full, read-only, or otherwise refuses.
            OutputExists: something is at `output`.
        """
        try:
            with staged(output, force=force, refusal=OutputExists) as directory:
                entry.write(directory)
        except Damaged:
            self._forget()
            return False
        return True

    def keep(self, bundle: Path, summary: dict[str, Any]) -> None:
        """Keep a bundle that was written now, with what is told of it; an interrupt ends that, and not the command."""
        if self._key is None:
            return
        try:
            self._keep(self._key, bundle, summary)
        except OSError as error:
            self.remarks.append(f"not kept: {error.strerror or error}")
        except KeyboardInterrupt:
            self.remarks.append("not kept: interrupted")

    def _keep(self, key: str, bundle: Path, summary: dict[str, Any]) -> None:
        own = f"{self._entries.folder}/"
        files = states((path for path in self._opened.read() if not path.startswith(own)), self._root)
        if written := written_since(files, self._root, self._opened.since_ns):
            self.remarks.append(f"not kept: `{written}` was written while the export ran")
            return
        self._entries.keep(key, bundle, {"summary": summary, "files": files})
        self._entries.note_command()

    def _forget(self) -> None:
        assert self._key is not None
        self._entries.remove(self._key)
        self.remarks.append("exported anew: the copy in the cache is damaged")


_UNREAD_OF_SOURCES = frozenset(("name", "root", "dynamic_shapes", "programs", "variants", "keep_operators"))
_UNREAD_OF_OPTIONS = frozenset(("output", "source_root", "force", "dump_passes", "progress"))
"""Fields that say nothing about the bundle, or that options have from the source."""


def _said(record: Any, unread: frozenset[str]) -> dict[str, Any]:
    names = [field.name for field in dataclasses.fields(record) if field.name not in unread]
    return {name: getattr(record, name) for name in names}
