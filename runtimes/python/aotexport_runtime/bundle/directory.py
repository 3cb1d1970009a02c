"""The directory of an open bundle. It is read through a descriptor, and stays while a bundle in it is open.

A shared lock on a directory says that somebody reads or writes it. Directories that were replaced, or that a killed
writer left, are removed by whoever gets the exclusive lock: the last one who read it, or the next writer.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import weakref
from pathlib import Path

MANIFEST_NAME = "bundle.json"
_DESCRIPTORS = Path("/proc/self/fd")
_TEMPORARY = re.compile(r"\..+\.export-[^./]{8}")
_ATTEMPTS = 1000


class BundleDirectory:
    """A directory that is held open, wherever its path leads meanwhile.

    Attributes:
        path: where it was when it was opened, absolute and without links; for messages.
        files: the same directory, to read files below; its path where the system lacks `/proc`.
    """

    def __init__(self, path: Path) -> None:
        self.path = path.resolve()
        self.files = self.path
        if _DESCRIPTORS.is_dir():
            descriptor = _open_shared(path)
            self.files = at_descriptor(descriptor, self.path)
            weakref.finalize(self, _close, descriptor)

    def holds(self, file: Path) -> bool:
        """Return whether a path below `files` leads to a file in the directory."""
        inside = file.relative_to(self.files).parts
        linked = any(self.files.joinpath(*inside[:end]).is_symlink() for end in range(1, len(inside) + 1))
        return not linked or file.resolve().is_relative_to(self.files.resolve())


def at_descriptor(descriptor: int, path: Path) -> Path:
    """Return a path of an open file or directory that leads nowhere else; `path` where the system lacks `/proc`."""
    return _DESCRIPTORS / str(descriptor) if _DESCRIPTORS.is_dir() else path


def temporary_prefix(output: Path) -> str:
    """Return how the names of temporary directories of `output` begin; eight characters follow."""
    return f".{output.name}.export-"


def lock_shared(descriptor: int) -> None:
    """Mark a directory as used until its descriptor is closed; file systems without locks mark nothing."""
    _lock(descriptor, exclusive=False)


def remove_unused(directory: Path, *, without_locks: bool = False) -> None:
    """Remove a temporary directory that nobody reads or writes.

    Args:
        directory: a temporary directory, or what stood where one was moved.
        without_locks: whether to remove it where the file system cannot tell.
    """
    # What cannot be removed stays: the bundle is well, and the next writer tries again.
    with contextlib.suppress(OSError):
        if directory.is_symlink():
            directory.unlink()
            return
        descriptor = os.open(directory, os.O_RDONLY)
        try:
            if _lock(descriptor, exclusive=True, else_=without_locks):
                remove_tree(directory)
        finally:
            os.close(descriptor)


def remove_tree(directory: Path) -> None:
    """Remove a directory and what is below, as far as the system allows."""
    # With `ignore_errors`, `rmtree` raises some all the same.
    with contextlib.suppress(OSError):
        shutil.rmtree(directory, ignore_errors=True)


def _open_shared(path: Path) -> int:
    """Return a descriptor of the directory at `path`, marked as used before anybody may remove it."""
    for _ in range(_ATTEMPTS):
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        lock_shared(descriptor)
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.stat(path), os.fstat(descriptor)):
                return descriptor
        # It was replaced, and may be gone by now.
        os.close(descriptor)
    raise OSError(f"`{path}` is replaced again and again")


def _close(descriptor: int) -> None:
    place = Path(os.readlink(_DESCRIPTORS / str(descriptor)))
    os.close(descriptor)
    if _TEMPORARY.fullmatch(place.name):
        remove_unused(place)


def _lock(descriptor: int, *, exclusive: bool, else_: bool = False) -> bool:
    """Lock a directory; return whether it is locked, `else_` where there are no locks."""
    import fcntl

    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB if exclusive else fcntl.LOCK_SH)
    except BlockingIOError:
        return False
    except OSError:
        return else_
    return True
