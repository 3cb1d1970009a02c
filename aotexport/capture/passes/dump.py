"""Write the graph after each pass to a file, to show the changes of each pass."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from pathlib import Path

from aotexport.capture.passes.draft import Draft
from aotexport.capture.passes.text import draft_text
from aotexport_runtime.errors import ArgumentInvalid

_folder: ContextVar[Path | None] = ContextVar("_folder", default=None)


@contextlib.contextmanager
def passes_dumped(directory: Path | None) -> Iterator[None]:
    """Let passes in the block write the drafts that they return; None: write nothing.

    Args:
        directory: made where it is missing. It gets `PROGRAM/00-traced.txt`, then a file for each pass that ran. Where
            a call is traced several times, the last trace stays.

    Raises:
        ArgumentInvalid: the directory cannot be made.
    """
    if directory is not None:
        try:
            directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ArgumentInvalid(f"`dump_passes` must be a directory to write to: {error}") from error
    token = _folder.set(directory)
    try:
        yield
    finally:
        _folder.reset(token)


@contextlib.contextmanager
def program_dumped(name: str) -> Iterator[None]:
    """Let passes in the block write to the program's folder, if they write at all."""
    directory = _folder.get()
    with passes_dumped(None if directory is None else directory / name):
        yield


def dump_draft(number: int, name: str, draft: Draft) -> None:
    """Write a draft after a pass, if a folder for it is set.

    Args:
        number: place of the pass in the list; 0: the draft was just traced, and files of earlier traces go.
        name: of the pass.
        draft: the draft that it returned.
    """
    folder = _folder.get()
    if folder is None:
        return
    if number == 0:
        for file in folder.glob("[0-9][0-9]-*.txt"):
            file.unlink()
    (folder / f"{number:02}-{name}.txt").write_text(draft_text(draft), encoding="utf-8")
