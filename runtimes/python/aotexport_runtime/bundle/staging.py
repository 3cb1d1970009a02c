"""Write a bundle: staged beside its place, synced, and moved there in one step.

Whenever the writer dies, and for every reader, the old bundle or the new one is at the path.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import glob
import os
import re
import shutil
import tempfile
from collections.abc import Generator
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from aotexport_runtime.bundle.directory import (
    MANIFEST_NAME,
    leads_to,
    lock,
    remove_tree,
    remove_unused,
    temporary_prefix,
)
from aotexport_runtime.errors import AotExportError, NotWritten, OutputExists


@contextlib.contextmanager
def staged(output: Path, *, force: bool, marker: str = MANIFEST_NAME) -> Generator[Path]:
    """Yield a temporary directory beside `output`, and move it there if the block succeeds; else remove it.

    A writer that is killed leaves it, and the next one to the same output removes it.

    Args:
        output: directory of the future bundle.
        force: replace an existing bundle. Those who have it open read it on; the last one removes it.
        marker: name of the file that a directory which may be replaced has.

    Raises:
        OutputExists: something is at `output` that may not be replaced, or nothing can be made there.
        NotWritten: the file system is full, read-only, or otherwise refuses.
    """
    if reason := why_not_written(output, force=force, marker=marker):
        raise OutputExists(reason)
    output = output.absolute()
    with _told(output):
        output.parent.mkdir(parents=True, exist_ok=True)
        stage, used = _new_stage(output)
        try:
            with contextlib.ExitStack() as undo:
                undo.callback(remove_tree, stage)
                yield stage
                open_modes(stage)
                # Files are brought to the disk before the directories that name them.
                for directory, _, files in os.walk(stage, topdown=False):
                    for path in (*(os.path.join(directory, file) for file in files), directory):
                        _sync_entries(Path(path))
                _move(stage, output, force=force, marker=marker)
                undo.pop_all()
        finally:
            with contextlib.suppress(OSError):  # It is closed all the same.
                os.close(used)
        remove_unused(stage, without_locks=True)


def why_not_written(output: Path, *, force: bool, marker: str = MANIFEST_NAME) -> str | None:
    """Return why no bundle can be written to `output`, with a way out; None: one can. See `staged`."""
    place = next((parent for parent in output.absolute().parents if os.path.exists(parent)), output)
    if not place.is_dir():
        return f"`{output}` would be below `{place}`, which is no directory; choose another place"
    try:
        # Permissions alone do not tell: some file systems are read-only for everyone.
        probe = tempfile.mkdtemp(prefix=temporary_prefix(output), dir=place)
        with contextlib.suppress(FileNotFoundError):  # Another writer takes it for one that was left.
            os.rmdir(probe)
    except OSError as error:
        refused = f"no directory can be made ({os.strerror(error.errno or 0)})"
        reason = "you may not write" if isinstance(error, PermissionError) else refused
        return f"`{output}` would be in `{place}`, where {reason}; choose another place"
    return _why_not_replaced(output, force=force, marker=marker)


def _why_not_replaced(output: Path, *, force: bool, marker: str) -> str | None:
    try:
        if not output.exists() or (output.is_dir() and not any(output.iterdir())):
            return None
    except OSError as error:
        return f"`{output}` is no place for a bundle ({error.strerror}); choose another place"
    if not (output / marker).is_file():
        return f"`{output}` exists and is no bundle; choose another place"
    if not force:
        return f"`{output}` exists; give force=True (--force) to replace it, or choose another place"
    return None


def _new_stage(output: Path) -> tuple[Path, int]:
    """Return a new temporary directory, and a descriptor that marks it as used; remove those that nobody uses."""
    prefix = temporary_prefix(output)
    with contextlib.suppress(OSError):
        for left in output.parent.glob(f"{glob.escape(prefix)}*/"):
            remove_unused(left)
    for _ in range(_ATTEMPTS):
        stage = Path(tempfile.mkdtemp(prefix=prefix, dir=output.parent))
        # Until it is marked, another writer may take it for one that was left.
        with contextlib.suppress(FileNotFoundError):
            used = os.open(stage, os.O_RDONLY)
            if lock(used) and leads_to(stage, used):
                return stage, used
            os.close(used)
    raise OSError(errno.EBUSY, "temporary directories are removed again and again", str(output))


_ATTEMPTS = 1000


def link(source: str | Path, target: str | Path) -> Any:
    """Make `target` the same file as `source`, or a copy where the file system has no links; return it."""
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError:
        shutil.copy2(source, target)
    return target


def open_modes(stage: Path) -> None:
    """Give files and directories the modes of ordinary new ones: temporary and safetensors files are private."""
    probe = stage / ".mode"
    descriptor = os.open(probe, os.O_CREAT | os.O_EXCL, 0o777)
    mode = os.fstat(descriptor).st_mode & 0o777
    os.close(descriptor)
    probe.unlink()
    for path in (stage, *stage.rglob("*")):
        if path.is_dir() or path.stat().st_nlink == 1:
            path.chmod(mode if path.is_dir() else mode & 0o666)


def _sync_entries(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _move(stage: Path, output: Path, *, force: bool, marker: str) -> None:
    """Move `stage` to `output` in one step; what was there is at `stage` then."""
    while True:
        try:
            # Onto nothing, or an empty directory.
            os.rename(stage, output)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                raise
            if reason := _why_not_replaced(output, force=force, marker=marker):
                raise OutputExists(reason) from None
            try:
                _exchange(stage, output)
            except FileNotFoundError:
                continue
        with contextlib.ExitStack() as undo:
            undo.callback(lambda: _exchange(output, stage) if stage.exists() else os.rename(output, stage))
            _sync_entries(output.parent)
            undo.pop_all()
        return


def _exchange(one: Path, other: Path) -> None:
    """Exchange two directories, by Linux's `renameat2`; where there is none, in three steps."""
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is not None:
        if not rename(_HERE, os.fsencode(one), _HERE, os.fsencode(other), _EXCHANGE):
            return
        number = ctypes.get_errno()
        if number not in (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP):
            raise OSError(number, os.strerror(number), str(other))
    aside = Path(tempfile.mkdtemp(prefix=f".{other.name}.old-", dir=other.parent), "bundle")
    try:
        os.rename(other, aside)
        with contextlib.ExitStack() as undo:
            undo.callback(os.rename, aside, other)
            os.rename(one, other)
            undo.pop_all()
        os.rename(aside, one)
    finally:
        aside.parent.rmdir()


_HERE, _EXCHANGE = -100, 2
"""`AT_FDCWD` and `RENAME_EXCHANGE` of Linux."""


@contextlib.contextmanager
def _told(output: Path) -> Generator[None]:
    """Raise what the file system refuses as one error of ours."""
    try:
        yield
    except AotExportError:
        raise
    except (OSError, SafetensorError) as error:
        if (number := _reason_of(error, output)) is None:
            raise
        message = f"`{output}` cannot be written: {os.strerror(number)}. Nothing was left behind"
        raise NotWritten(f"{message}; make room, or choose another place", number) from error


def _reason_of(error: Exception, output: Path) -> int | None:
    """Return the system's number of the reason why nothing can be written at `output`; None: another error."""
    if not isinstance(error, OSError):
        # Libraries in Rust raise errors of their own.
        found = re.search(r"\(os error (\d+)\)", str(error))
        return int(found[1]) if found and int(found[1]) in _OF_THE_DISK else None
    if error.filename is not None:
        return error.errno if str(error.filename).startswith(str(output.parent)) else None
    return error.errno if error.errno in _OF_THE_DISK else None


_OF_THE_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG, errno.EIO)
