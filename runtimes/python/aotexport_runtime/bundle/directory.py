"""The directory of an open bundle, read through a descriptor; it stays while a bundle in it is open.

A shared lock says that somebody uses it. What was replaced or left is removed by whoever gets the exclusive lock.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import stat
import struct
import sys
import tempfile
import weakref
from collections.abc import Generator
from io import BufferedReader
from pathlib import Path

from aotexport_runtime.errors import BundleInvalid
from aotexport_runtime.sandbox import call

MANIFEST_NAME = "bundle.json"
_DESCRIPTORS = Path("/proc/self/fd")
_ATTEMPTS = 1000
_OPENAT2, _BENEATH = 437, 0x02 | 0x08
"""The system call of Linux 5.6, with `RESOLVE_NO_MAGICLINKS` and `RESOLVE_BENEATH`."""


class BundleDirectory:
    """A directory that is held open, wherever its path leads meanwhile.

    Attributes:
        path: where it was when it was opened, absolute and without links; for messages.
        files: the same directory, to read files below; its path where the system lacks `/proc`.
    """

    def __init__(self, path: Path) -> None:
        self.path = Path(os.path.realpath(path))
        self._descriptor = _open_shared(path)
        self.files = at_descriptor(self._descriptor, self.path)
        self._holes: dict[str, int] = {}
        weakref.finalize(self, _close, self._descriptor, self.path)

    def open(self, file: str) -> BufferedReader:
        """Return the regular file at a plain relative path, open to be read; see `open_regular`.

        Refused (`BundleInvalid`): there is none, it leads outside (without `openat2`: it is a link), or files have
        large holes in the place of data.
        """
        try:
            stream = _regular(_open_beneath(self._descriptor, file))
        except OSError as error:
            if error.errno in (errno.EXDEV, errno.ELOOP):
                raise BundleInvalid("leads outside the bundle", where=file, check="file-outside/link") from error
            reason = "may not be read" if isinstance(error, PermissionError) else "missing"
            raise BundleInvalid(reason, where=file, check="file-missing/file") from error
        if found := hole_nbytes(stream):
            self._holes[file] = found
        if found and sum(self._holes.values()) > MAX_HOLE_NBYTES:
            stream.close()
            message = f"with it, files have more than {MAX_HOLE_NBYTES} bytes of holes in the place of data"
            raise BundleInvalid(message, where=file, check="file-differs/hole")
        return stream


def _open_beneath(directory: int, file: str) -> int:
    how = struct.pack("QQQ", _FLAGS, 0, _BENEATH)
    for _ in range(_ATTEMPTS if sys.platform == "linux" else 0):
        try:
            return call(_OPENAT2, directory, os.fsencode(file), how, len(how))
        except OSError as error:
            if error.errno in (errno.ENOSYS, errno.EPERM):
                break
            if error.errno != errno.EAGAIN:  # Something was renamed meanwhile.
                raise
    return _open_without_links(directory, file)


def open_regular(path: str | os.PathLike[str]) -> BufferedReader:
    """Return the regular file at a path, open to be read, without waiting, as a pipe would; else raise `OSError`."""
    return _regular(os.open(path, _FLAGS))


_FLAGS = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOCTTY", 0) | getattr(os, "O_CLOEXEC", 0)


def read_most(stream: BufferedReader, nbytes: int) -> bytes:
    """Return the bytes of an open file; of one that is larger than `nbytes`, one more than that."""
    return stream.read(min(os.fstat(stream.fileno()).st_size, nbytes) + 1)[: nbytes + 1]


def _regular(descriptor: int) -> BufferedReader:
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return os.fdopen(descriptor, "rb")
    os.close(descriptor)
    raise FileNotFoundError(errno.ENOENT, "no regular file")


def _open_without_links(directory: int, file: str) -> int:
    *parents, name = file.split("/")
    above = os.dup(directory)
    try:
        for parent in parents:
            below = os.open(parent, _FLAGS | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=above)
            os.close(above)
            above = below
        return os.open(name, _FLAGS | os.O_NOFOLLOW, dir_fd=above)
    finally:
        os.close(above)


MAX_HOLE_NBYTES = 1 << 28
"""Bytes of the files of one bundle that need not take place on the disk."""


def hole_nbytes(stream: BufferedReader) -> int:
    """Return the size of the holes of a file, which take no place on the disk; above the limit, that of the first."""
    status, found, end = os.fstat(stream.fileno()), 0, 0
    if not hasattr(os, "SEEK_HOLE") or status.st_blocks * 512 >= status.st_size:
        return 0
    with contextlib.suppress(OSError):  # The file system does not tell.
        while end < status.st_size and found <= MAX_HOLE_NBYTES:
            hole = os.lseek(stream.fileno(), end, os.SEEK_HOLE)
            end = status.st_size
            with contextlib.suppress(OSError):  # There is no data behind it.
                end = os.lseek(stream.fileno(), hole, os.SEEK_DATA)
            found += end - hole
    os.lseek(stream.fileno(), 0, os.SEEK_SET)
    return found


def at_descriptor(descriptor: int, path: Path) -> Path:
    """Return a path of an open file or directory that leads nowhere else; `path` where the system lacks `/proc`."""
    return _DESCRIPTORS / str(descriptor) if _DESCRIPTORS.is_dir() else path


@contextlib.contextmanager
def private_file(data: bytes, nbytes: int = 0) -> Generator[Path, None, None]:
    """Yield the path of a file of this process alone, for libraries that read paths: `data`, zeros up to `nbytes`."""
    in_memory = hasattr(os, "memfd_create")
    with os.fdopen(os.memfd_create("private"), "wb") if in_memory else tempfile.NamedTemporaryFile() as stream:
        stream.write(data)
        stream.truncate(max(nbytes, len(data)))
        yield at_descriptor(stream.fileno(), Path(str(stream.name)))


def temporary_prefix(output: Path) -> str:
    """Return how the names of temporary directories of `output` begin; eight characters follow."""
    return f".{output.name}.export-"


def remove_unused(directory: Path, *, without_locks: bool = False) -> None:
    """Remove a temporary directory that nobody reads or writes; `without_locks`: also where no file system tells."""
    # What cannot be removed stays: the bundle is well, and the next writer tries again.
    with contextlib.suppress(OSError):
        if directory.is_symlink():
            directory.unlink()
            return
        descriptor = os.open(directory, _FLAGS | os.O_DIRECTORY)
        try:
            if lock(descriptor, exclusive=True, else_=without_locks):
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
        # No writer removes what is at the path: whoever else has locked it does not keep anybody from reading.
        lock(descriptor)
        if leads_to(path, descriptor):
            return descriptor
        # It was replaced, and may be gone by now.
        os.close(descriptor)
    raise OSError(errno.EBUSY, "it is replaced again and again", str(path))


def leads_to(path: Path, descriptor: int) -> bool:
    """Return whether a path leads to an open directory."""
    try:
        return os.path.samestat(os.stat(path), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _close(descriptor: int, opened: Path) -> None:
    link = _DESCRIPTORS / str(descriptor)
    place = Path(os.readlink(link)) if link.is_symlink() else opened
    os.close(descriptor)
    # Only an exchange moves it to such a name.
    if place.parent == opened.parent and re.fullmatch(re.escape(temporary_prefix(opened)) + "[^./]{8}", place.name):
        remove_unused(place)


def lock(descriptor: int, *, exclusive: bool = False, else_: bool = True) -> bool:
    """Mark an open directory as used until it is closed; return whether it is, `else_` where there are no locks."""
    import fcntl

    try:
        fcntl.flock(descriptor, fcntl.LOCK_NB | (fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH))
    except BlockingIOError:
        return False
    except OSError:
        return else_
    return True
