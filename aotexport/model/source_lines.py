"""Find the user's source lines in the running frame and in recorded stack traces."""

from __future__ import annotations

import functools
import re
import sys
import sysconfig
from pathlib import Path
from types import FrameType

import torch

import aotexport_runtime
from aotexport_runtime.errors import AotExportError, first_line
from aotexport_runtime.execution.source import original_line
from aotexport_runtime.schema.graph import SourceLine

# Directories end in a slash: `torchvision` is not of `torch`.
_TORCH = f"{Path(torch.__file__).parent}/"
_HERE = f"{Path(__file__).parents[1]}/"
_RUNTIME = f"{Path(aotexport_runtime.__file__).parent}/"
_EXPORT = str(Path(__file__).parents[1] / "pipeline" / "export.py")
_STDLIB = f"{sysconfig.get_paths()['stdlib']}/"
_SITE = tuple(sorted({f"{sysconfig.get_paths()[name]}/" for name in ("purelib", "platlib")}))
_TRITON = tuple(f"{site}triton/" for site in _SITE)
_TYPED = ("<stdin>", "<string>", "<ipython-input", "<python-input")
_ASKED = re.compile(r"data-dependent expression (.+?) \(unhinted|^(aten\.\w+)\.\w+$")
"""Torch's messages about symbolic numbers that only the data know, and about operators that return such numbers."""
_CONDITION = re.compile(r"Eq\(u\d+, 1\)")
_SYMBOL = re.compile(r"\b(?:u|zuf)\d+\b")
_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<function>\S+)')


@functools.cache
def is_user_file(file: str) -> bool:
    """Return whether `file` is not of torch, Triton, Python or aotexport; typed code counts as the user's."""
    if file.startswith((_TORCH, _HERE, _RUNTIME, *_TRITON, "<")):
        return file.startswith(_TYPED)
    return not is_stdlib_file(file)


def is_user_frame(frame: FrameType) -> bool:
    """Return whether `frame` runs the user's code, or a loaded bundle's graph, which stands for its user's code.

    Code that a user types runs in a module without a file. Libraries also compile code from text: torch's has no
    module, that of dataclasses has one with a file.
    """
    file, names = frame.f_code.co_filename, frame.f_globals
    if original_line(file, frame.f_lineno) is not None:
        return True
    return is_user_file(file) and (not file.startswith(_TYPED) or ("__name__" in names and "__file__" not in names))


def own_room(file: str) -> str:
    """Return the package of aotexport that `file` is in; empty: it is not of aotexport."""
    return file.removeprefix(_HERE).partition("/")[0] if file.startswith(_HERE) else ""


def is_library_file(file: str) -> bool:
    """Return whether `file` is of an installed package."""
    return file.startswith(_SITE)


def is_stdlib_file(file: str) -> bool:
    """Return whether `file` is of Python's own library."""
    return file.startswith((_STDLIB, "<frozen")) and not is_library_file(file)


def user_line(error: BaseException | None = None) -> str:
    """Return `file:line: in function: ` of the innermost user frame, or an empty string.

    The frame is one of the traceback of `error`; None: of the running stack, up to the export.
    """
    found: SourceLine | None = None
    if error is not None:
        trace = error.__traceback__
        while trace is not None:
            code = trace.tb_frame.f_code
            if is_user_frame(trace.tb_frame):
                found = _line(code.co_filename, trace.tb_lineno, code.co_name)
            trace = trace.tb_next
    else:
        frame = sys._getframe(1)
        while frame is not None and found is None and frame.f_code.co_filename != _EXPORT:
            if is_user_frame(frame):
                found = _line(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)
            frame = frame.f_back  # type: ignore[assignment]
    return f"{found.file}:{found.line}: in {found.function}: " if found else ""


def _line(file: str, line: int, function: str) -> SourceLine:
    return original_line(file, line) or SourceLine(file=file, line=line, function=function)


def described(error: BaseException) -> str:
    """Return an error in one line: the user's line, its type if it is not ours, and the first line of its message."""
    where, text = user_line(error), first_line(error)
    if (asked := _ASKED.search(str(error))) is not None:
        question = asked[1] or asked[2]
        condition = "a condition" if _CONDITION.fullmatch(question) else f"`{_SYMBOL.sub('value', question)}`"
        return f"{where}code asks for {condition}, which the values of tensors decide, and a trace has none"
    if isinstance(error, AotExportError):
        return text if text.startswith(where) else f"{where}{text}"
    return f"{where}{type(error).__name__}: {text}"


def source_of(stack_trace: str | None, root: Path | None) -> SourceLine | None:
    """Return the innermost user line of a stack trace as Python formats it.

    `root` is the directory that the exported model's own files are relative to.
    """
    if not stack_trace:
        return None
    frames = [(match["file"], int(match["line"]), match["function"]) for match in _FRAME.finditer(stack_trace)]
    originals = [original_line(file, line) for file, line, _ in frames]
    for (file, line, function), original in reversed([*zip(frames, originals, strict=True)]):
        if original is not None:
            return original
        # Operators of a loaded graph run code that torch compiles from text.
        if is_user_file(file) and not (any(originals) and file.startswith(_TYPED)):
            return SourceLine(file=relative_path(file, root), line=line, function=function)
    return None


def relative_path(file: str, root: Path | None) -> str:
    """Return `file` without parts specific to this machine: relative to `root` or site-packages, or its bare name."""
    for base in (*(() if root is None else (f"{root}".rstrip("/") + "/",)), *_SITE):
        if file.startswith(base):
            return file[len(base) :]
    return Path(file).name
