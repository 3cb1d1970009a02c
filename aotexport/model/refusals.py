"""Classify errors in a stage of the export: torch, a compiler or the model's code refuses, or aotexport has a bug.

The traceback and the class of the error decide. An error that only wrong code of ours can raise is a bug anywhere: a
misspelt name or attribute, a failed assertion, or a call of our function with wrong arguments, in a file of ours.
"""

from __future__ import annotations

import contextlib
import platform
import re
import traceback
import types
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path

import torch

import aotexport_runtime
from aotexport.errors import AttemptFailed, ExportFailed, InternalError, ModelFileInvalid, VerificationFailed
from aotexport.model.source_lines import described, is_user_frame
from aotexport_runtime.errors import AotExportError, OutputExists

_OURS = tuple(str(Path(file).parent) + "/" for file in (Path(__file__).parent, aotexport_runtime.__file__))
_LAYERS = tuple(f"{Path(torch.__file__).parent}/{package}/" for package in ("nn", "distributions", "optim"))
"""Torch's own code that counts as part of models."""
_COMPILERS = re.compile(r"/torch/_(dynamo|inductor)/|/site-packages/triton/")
_LIBRARIES = re.compile(r"/site-packages/(sympy|mpmath|numpy|onnx|onnx_ir|onnxscript|onnxruntime|msgspec|safetensors)/")
"""Libraries that aotexport and torch call; if a model calls one, a line of the model is above it."""
_ERRORS_OF_THE_MACHINE = (OSError, MemoryError, torch.OutOfMemoryError)
_TORCH_ERRORS = (RuntimeError, IndexError, TypeError, ValueError, AssertionError)
"""Those by which torch says that it cannot do something; others are bugs: `TORCH_CHECK` and kin (torch 2.13,
torch/csrc/Exceptions.h), what its Python derives from them, and its assertions about programs."""
_OF_THE_EXPORT = (ExportFailed, InternalError, ModelFileInvalid, OutputExists, VerificationFailed)
_BINDING = re.compile(r"(?:\w+\.)*(\w+)\(\) (?:got|missing|takes)\b")


@contextlib.contextmanager
def attempt(stage: str) -> Iterator[None]:
    """Classify errors of an attempt that the export may go on without; errors of the exporter itself pass.

    The stage is named to the user who reports a bug. `AttemptFailed`: torch or the model's code refuses.
    `InternalError`: aotexport has a bug.
    """
    try:
        yield
    except _OF_THE_EXPORT:
        raise
    except Exception as error:
        if is_bug(error):
            raise internal_error(stage, error) from error
        raise AttemptFailed(described(error), error) from error


@contextlib.contextmanager
def bugs_reported(stage: Callable[[], str]) -> Iterator[None]:
    """Let errors of ours, of the model's code and of the machine pass; others are an `InternalError`.

    `stage` returns the current stage of the export.
    """
    try:
        yield
    except (AotExportError, *_ERRORS_OF_THE_MACHINE):
        raise
    except Exception as error:
        if is_bug(error) or not any(map(_is_of_a_model, _frames(error))):
            raise internal_error(stage(), error) from error
        raise


def internal_error(stage: str, error: Exception) -> InternalError:
    """Return the error that reports a bug in a stage of the export to the user."""
    versions = (
        f"aotexport {metadata.version('aotexport')}, torch {torch.__version__}, Python {platform.python_version()}"
    )
    return InternalError(
        f"a bug of aotexport, in the stage `{stage}`: {described(error)}. Nothing was written. Please report it, with "
        f"these versions ({versions}) and the traceback"
    )


def is_bug(error: BaseException) -> bool:
    """Return whether an error is a bug of aotexport; see the module."""
    if isinstance(error, AotExportError):
        return isinstance(error, InternalError)
    if any(map(_is_of_wrong_code, _chain(error))):
        return True
    frames = _frames(error)
    if not frames or isinstance(error, _ERRORS_OF_THE_MACHINE) or any(map(_is_of_a_model, frames)):
        return False
    if _COMPILERS.search(frames[-1].f_code.co_filename) or type(error).__module__.startswith("onnxruntime."):
        return False
    # Functions in C have no frames: an error of torch's functions seems raised by our frame.
    return not isinstance(error, RuntimeError if _is_ours(frames[-1]) else _TORCH_ERRORS)


def _chain(error: BaseException) -> Iterator[BaseException]:
    behind: BaseException | None = error
    seen: set[int] = set()
    while behind is not None and id(behind) not in seen:
        yield behind
        seen.add(id(behind))
        behind = behind.__cause__ or behind.__context__


def _is_of_wrong_code(error: BaseException) -> bool:
    """Return whether an error is one that no model can make right code of ours raise."""
    frames = _frames(error)
    while len(frames) > 1 and frames[-1].f_code.co_name in ("__getattr__", "__getattribute__"):
        frames.pop()
    if not frames or not _is_ours(frames[-1]):
        return False
    code, names = frames[-1].f_code, frames[-1].f_globals
    if isinstance(error, AttributeError):
        # A misspelt name in the code, not `getattr` of a name from the model.
        return error.name in code.co_names
    if isinstance(error, TypeError) and (match := _BINDING.match(str(error))):
        called = names.get(match[1])
        return isinstance(called, types.FunctionType) and called.__code__.co_filename.startswith(_OURS)
    return isinstance(error, NameError | AssertionError)


def _frames(error: BaseException) -> list[types.FrameType]:
    return [frame for frame, _ in traceback.walk_tb(error.__traceback__)]


def _is_ours(frame: types.FrameType) -> bool:
    return frame.f_code.co_filename.startswith(_OURS)


def _is_of_a_model(frame: types.FrameType) -> bool:
    file = frame.f_code.co_filename
    return file.startswith(_LAYERS) or (is_user_frame(frame) and _LIBRARIES.search(file) is None)
