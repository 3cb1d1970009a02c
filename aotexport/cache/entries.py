"""The directory of kept exports: find one, write its bundle, keep a new one, remove those that were not used lately.

A process writes an entry under a name of its own and renames it; one that is read while another process removes it is
no entry. Every file is compared with its digest as it is copied.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from aotexport_runtime.engines.user_cache import cache_folder

_RECORD = "entry.json"
_BUNDLE = "bundle"
_PART_NBYTES = 1 << 22
_LEFT_AFTER_S = 24 * 3600
"""Age at which notes are removed, and directories of writers that never ended."""
DEFAULT_NBYTES = 5_000_000_000
"""Size that all entries may have together."""


class Damaged(Exception):
    """A file of an entry is not what was written."""


@dataclass(frozen=True)
class Entry:
    """A kept export.

    Attributes:
        path: its directory.
        kept: what `Entries.keep` was given with it.
    """

    path: Path
    kept: dict[str, Any]
    _digests: dict[str, str]

    def write(self, directory: Path) -> None:
        """Copy the bundle into an empty directory.

        Raises:
            Damaged: a file differs from what was kept, or another process has removed it.
        """
        for name, digest in self._digests.items():
            target = directory / name
            target.parent.mkdir(parents=True, exist_ok=True)
            try:
                source = (self.path / _BUNDLE / name).open("rb")
            except OSError as error:
                raise Damaged(name) from error
            with source:
                if _copied(source, target) != digest:
                    raise Damaged(name)


class Entries:
    """The entries in one directory.

    Attributes:
        folder: the directory; made by the first entry.
        most_nbytes: size that all entries may have together.
    """

    def __init__(self, folder: Path, most_nbytes: int) -> None:
        self.folder, self.most_nbytes = folder, most_nbytes

    def find(self, key: str) -> Entry | None:
        """Return the entry of a key; None: there is none.

        Raises:
            Damaged: its record is not what was written.
        """
        path = self.folder / key
        try:
            digest, _, text = (path / _RECORD).read_text().partition("\n")
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (OSError, UnicodeDecodeError) as error:
            raise Damaged(_RECORD) from error
        if hashlib.sha256(text.encode()).hexdigest() != digest:
            raise Damaged(_RECORD)
        with contextlib.suppress(OSError):
            os.utime(path)
        return Entry(path, **json.loads(text))

    def keep(self, key: str, bundle: Path, kept: dict[str, Any]) -> None:
        """Keep a bundle with a document under a key, in the place of an earlier entry, and make room for it.

        Raises:
            OSError: the disk is full, or the file system refuses.
        """
        files = [path for path in bundle.rglob("*") if path.is_file()]
        nbytes = sum(path.stat().st_size for path in files)
        if nbytes > self.most_nbytes:
            raise OSError(errno.EFBIG, f"it has {nbytes:,} bytes, and the cache at most {self.most_nbytes:,}")
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        stage = Path(tempfile.mkdtemp(prefix=".new-", dir=self.folder))
        try:
            digests: dict[str, str] = {}
            for path in files:
                name = path.relative_to(bundle).as_posix()
                (stage / _BUNDLE / name).parent.mkdir(parents=True, exist_ok=True)
                with path.open("rb") as source:
                    digests[name] = _copied(source, stage / _BUNDLE / name)
            text = json.dumps({"kept": kept, "_digests": digests})
            (stage / _RECORD).write_text(f"{hashlib.sha256(text.encode()).hexdigest()}\n{text}")
            self.remove(key)
            try:
                os.rename(stage, self.folder / key)
            except OSError as error:  # Another process may have kept the same meanwhile.
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                    raise
        finally:
            shutil.rmtree(stage, ignore_errors=True)
        self._make_room()

    def note_command(self) -> None:
        """Note that the bundle of this command, in this directory, is kept; the note lasts a day."""
        (self.folder / _command()).touch()

    def expects_command(self) -> bool:
        """Return whether the bundle of this command was kept lately, and will be found if nothing has changed."""
        return (self.folder / _command()).exists()

    def remove(self, key: str) -> None:
        """Remove an entry, if there is one; who reads it meanwhile finds some of its files gone."""
        with contextlib.suppress(OSError), tempfile.TemporaryDirectory(prefix=".old-", dir=self.folder) as aside:
            os.rename(self.folder / key, Path(aside, key))

    def clear(self) -> None:
        """Remove all entries."""
        for path, _, _ in self.listed():
            self.remove(path.name)

    def listed(self) -> list[tuple[Path, float, int]]:
        """Return the directory, the time of the last use and the bytes of each entry, those used lately first."""
        return sorted(self._listed(), key=lambda entry: -entry[1])

    def _listed(self) -> Iterator[tuple[Path, float, int]]:
        with contextlib.suppress(FileNotFoundError):
            for path in self.folder.iterdir():
                with contextlib.suppress(FileNotFoundError):
                    nbytes = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
                    yield path, path.stat().st_mtime, nbytes

    def _make_room(self) -> None:
        """Remove old notes, what writers left that never ended, and entries until the rest has its size."""
        together = 0
        for path, used_s, nbytes in self.listed():
            left = path.name.startswith(".")
            if left and time.time() - used_s > _LEFT_AFTER_S:
                shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)
            elif not left:
                together += nbytes
                if together > self.most_nbytes:
                    self.remove(path.name)


def user_entries() -> Entries | None:
    """Return the entries of the user's cache; None: the user has no home.

    The variable `AOTEXPORT_CACHE` names another directory than `$XDG_CACHE_HOME/aotexport/exports`,
    `AOTEXPORT_CACHE_SIZE` another number of bytes than 5,000,000,000.

    Raises:
        ValueError: `AOTEXPORT_CACHE_SIZE` is no number of bytes.
    """
    named = os.environ.get("AOTEXPORT_CACHE")
    folder = Path(named).absolute() if named else cache_folder("exports")
    size = os.environ.get("AOTEXPORT_CACHE_SIZE")
    return None if folder is None else Entries(folder, DEFAULT_NBYTES if size is None else int(size))


def _command() -> str:
    return f".command-{hashlib.sha256(json.dumps([os.getcwd(), sys.argv]).encode()).hexdigest()}"


def _copied(source: BinaryIO, target: Path) -> str:
    """Copy a file; return the digest of what was read."""
    digest = hashlib.sha256()
    with target.open("xb") as written:
        while part := source.read(_PART_NBYTES):
            digest.update(part)
            written.write(part)
    return digest.hexdigest()
