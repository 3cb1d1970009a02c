"""Compares digests in a thread: hashing releases the interpreter."""

from __future__ import annotations

import contextlib
import hashlib
import mmap
import os
import threading
from collections.abc import Generator

from aotexport_runtime.bundle.read import TAMPERED, Bundle
from aotexport_runtime.errors import BundleInvalid


@contextlib.contextmanager
def digests_compared(bundle: Bundle) -> Generator[None, None, None]:
    """Compare the SHA-256 of every file of `bundle` with the manifest while the block runs.

    Raises:
        BundleInvalid: names the first file that differs, at the end of the block, even if that raised.
    """
    wrong: list[Exception] = []
    thread = threading.Thread(target=_compare, args=(bundle, wrong), name="aotexport digests", daemon=True)
    thread.start()
    try:
        yield
    finally:
        thread.join()
        if wrong:
            raise wrong[0] from None


def _compare(bundle: Bundle, wrong: list[Exception]) -> None:
    try:
        for entry in bundle.manifest.files:
            if _sha256(bundle, entry.path) != entry.sha256:
                raise BundleInvalid(TAMPERED, where=entry.path, check="file-differs/digest")
    except Exception as error:  # noqa: BLE001 - raised by the thread that waits
        wrong.append(error)


def _sha256(bundle: Bundle, path: str) -> str:
    """Return the digest of a file in one step, since each step waits for the interpreter."""
    with bundle.stream(path) as stream:
        if not os.fstat(stream.fileno()).st_size:
            return hashlib.sha256().hexdigest()
        with mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return hashlib.sha256(data).hexdigest()
