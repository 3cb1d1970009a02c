"""Patch Python and torch for the time of a block, and register the patches; there is no other way to patch.

Functions are patched for the thread that captures, flags and classes for all threads.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from collections.abc import Callable, Iterator, MutableMapping
from dataclasses import dataclass
from types import FrameType, FunctionType, MethodType
from typing import Any

from torch.compiler import is_dynamo_compiling

from aotexport.process.blocks import uninterrupted

ALWAYS = "never: tracing needs it by its nature"
"""For patches that show to a trace the behaviour of torch outside of its operators."""


@dataclass(frozen=True)
class Patch:
    """A patch.

    Attributes:
        owner: a class, module, function or object with the attribute, a dict with the key, or dicts without it.
        name: of the attribute or key; inherited attributes are shadowed.
        replacement: the value to set instead.
        reason: why, as a sentence without a subject: `Record ...`, `Refuse ...`.
        remove_when: a requirement such as `torch>=2.15`, under which to check whether it can go; or `ALWAYS`.
        in_all_threads: patch a function for every thread, for one that torch's compiler reads.
    """

    owner: Any
    name: Any
    replacement: Any
    reason: str
    remove_when: str = ALWAYS
    in_all_threads: bool = False

    @property
    def target(self) -> str:
        """Name of the patched object: `torch._tensor.Tensor.contiguous`."""
        if isinstance(self.owner, MutableMapping | list):
            return f"[{self.name}]"
        owner = self.owner if hasattr(self.owner, "__name__") else type(self.owner)
        module = "" if isinstance(owner, type(sys)) else f"{owner.__module__}."
        return f"{module}{getattr(owner, '__qualname__', owner.__name__)}.{self.name}"


seen: dict[str, Patch] = {}
"""The patches that this process has made so far, by target."""


@contextlib.contextmanager
def patched(*patches: Patch) -> Iterator[None]:
    """Make patches for the block, one after the other, and undo them whatever ends it."""
    undo = contextlib.ExitStack()
    try:
        with uninterrupted():
            for patch in patches:
                seen[patch.target] = patch
                _put(patch, undo)
        yield
    finally:
        with uninterrupted():
            undo.close()


def _put(patch: Patch, undo: contextlib.ExitStack) -> None:
    """Make a patch, once `undo` knows how to undo it."""
    owner, name = patch.owner, patch.name
    if isinstance(owner, list):
        undo.callback(lambda: [table.pop(name, None) for table in owner])
        for table in owner:
            table[name] = patch.replacement
        return
    if isinstance(owner, MutableMapping):
        put, remove, before = owner.__setitem__, owner.pop, owner
    else:
        put, remove = functools.partial(setattr, owner), functools.partial(delattr, owner)
        before = {name: owner.__code__} if name == "__code__" else vars(owner)
    if name in before:
        undo.callback(put, name, before[name])
    else:
        undo.callback(remove, name)
    put(name, patch.replacement if patch.in_all_threads else _for_this_thread(patch))


def _for_this_thread(patch: Patch) -> Any:
    """Return the replacement of a function or property in a form that gives other threads the original."""
    replacement = patch.replacement
    if isinstance(replacement, property):
        original = getattr(patch.owner, patch.name, None)
        accessors = ((replacement.fget, "__get__"), (replacement.fset, "__set__"))
        read, write = (new and in_this_thread(new, getattr(original, kind, None)) for new, kind in accessors)
        return property(read, write)  # pyrefly: ignore[bad-argument-type] (by their kinds)
    if isinstance(replacement, staticmethod):
        return staticmethod(in_this_thread(replacement.__func__, getattr(patch.owner, patch.name)))
    binds = FunctionType if isinstance(patch.owner, type) else FunctionType | MethodType | functools.partial
    if isinstance(patch.owner, MutableMapping) or not isinstance(replacement, binds):
        return replacement
    return in_this_thread(replacement, getattr(patch.owner, patch.name, None))


def in_this_thread(replacement: Callable[..., Any], original: Callable[..., Any] | None) -> Callable[..., Any]:
    """Return a function that calls `replacement` in the current thread, and `original` in all others."""
    captures = threading.get_ident()

    def dispatch(*args: Any, **kwargs: Any) -> Any:
        # Torch's compiler reads this code where a subgraph of an operator is captured, and knows no threads.
        if original is None or is_dynamo_compiling() or threading.get_ident() == captures:
            return replacement(*args, **kwargs)
        return original(*args, **kwargs)

    with contextlib.suppress(AttributeError, TypeError):
        functools.update_wrapper(dispatch, replacement)
    return dispatch


def caller() -> FrameType:
    """Return the frame that called a replacement; to be called by the replacement itself."""
    frame = sys._getframe(2)
    while frame.f_code.co_filename == __file__ and frame.f_back is not None:
        frame = frame.f_back
    return frame
