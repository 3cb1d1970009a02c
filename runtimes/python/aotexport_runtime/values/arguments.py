"""Checks of the arguments of public functions. No torch."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Iterable
from functools import reduce, wraps
from importlib import metadata
from inspect import Signature, cleandoc, getdoc, signature
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from aotexport_runtime.errors import ArgumentInvalid, TorchMissing

_Result = TypeVar("_Result")


def check_type(name: str, value: Any, types: type | tuple[type, ...], expected: str) -> None:
    """Refuse an argument that is of none of the `types`, in words `expected` (`ArgumentInvalid`)."""
    if not isinstance(value, types):
        got = "None" if value is None else type(value).__name__
        raise ArgumentInvalid(f"`{name}`: expected {expected}, got {got}")


def path_of(name: str, value: Any) -> Path:
    """Return an argument as a path; refuse what is neither a string nor a path (`ArgumentInvalid`)."""
    check_type(name, value, (str, os.PathLike), "a path")
    return Path(value)


def names_of(name: str, value: Any) -> tuple[str, ...]:
    """Return the names in an argument: one, or several; refuse what are no strings (`ArgumentInvalid`)."""
    check_type(name, value, (str, Iterable), "names")
    names = (value,) if isinstance(value, str) else tuple(value)
    for each in names:
        check_type(name, each, str, "names")
    return names


def keywords_of(record: Callable[..., Any]) -> Callable[[Callable[..., _Result]], Callable[..., _Result]]:
    """Return a decorator: the fields of a dataclass are keywords of a function, whose parameter `options` it is.

    Signature and help of the function name them, with types, defaults and the sentences of the record and its bases.
    """

    def decorate(function: Callable[..., _Result]) -> Callable[..., _Result]:
        own = {name: each for name, each in signature(function).parameters.items() if name != "options"}
        fields = signature(record).parameters
        required = [name for name, each in fields.items() if each.default is each.empty]

        @wraps(function)
        def taking(*args: Any, **keywords: Any) -> _Result:
            others = {name: keywords.pop(name) for name in own if name in keywords}
            if unknown := [name for name in keywords if name not in fields]:
                raise TypeError(f"{function.__qualname__}() got an unexpected keyword argument {unknown[0]!r}")
            if missing := [name for name in required if name not in keywords]:
                raise TypeError(f"{function.__qualname__}() misses the keyword argument {missing[0]!r}")
            return function(*args, **others, options=record(**keywords))

        taking.__dict__["__signature__"] = Signature([*own.values(), *fields.values()])
        told = [cleandoc(each.__doc__ or "").partition("Attributes:\n")[2] for each in getattr(record, "__mro__", ())]
        taking.__doc__ = "\n".join([f"{getdoc(function)}\n\nOptions:", *filter(None, told)])
        return taking

    return decorate


def imported(name: str) -> ModuleType:
    """Import and return the module that a user names; refuse one that cannot be imported (`ArgumentInvalid`)."""
    try:
        return importlib.import_module(name)
    except (ImportError, ValueError) as error:
        raise ArgumentInvalid(f"importing `{name}` failed: {error}") from error


def class_named(name: str) -> type:
    """Return the class that the caller names `module:qualified.name`.

    Raises:
        ArgumentInvalid: there is none.
    """
    module, _, path = name.partition(":")
    found: Any = reduce(lambda owner, part: getattr(owner, part, None), path.split("."), imported(module))
    if not isinstance(found, type):
        raise ArgumentInvalid(f"`{name}` is no class; write MODULE:NAME, for example `mine.tensors:Int8Tensor`")
    return found


def places_of(names: Iterable[str]) -> list[str]:
    """Return where the files of modules at the top of packages are, without importing them."""
    found: list[str] = []
    for name in names:
        spec = importlib.util.find_spec(name)
        if spec is not None:
            found += spec.submodule_search_locations or ([spec.origin] if spec.has_location and spec.origin else [])
    return found


_LEAST_TORCH = (2, 7)


def check_torch(feature: str) -> None:
    """Refuse a feature, the subject of the sentence, where torch is not installed or too old (`TorchMissing`)."""
    if importlib.util.find_spec("torch") is None:
        raise TorchMissing(
            f"{feature} needs torch, which is not installed here. Install it by `pip install 'torch>=2.7'`"
        )
    with contextlib.suppress(metadata.PackageNotFoundError):
        found = metadata.version("torch")
        if tuple(map(int, found.split(".")[:2])) < _LEAST_TORCH:
            raise TorchMissing(f"{feature} needs torch 2.7 or newer, and this is {found}. `pip install 'torch>=2.7'`")


def why_unfit_interpreter() -> str | None:
    """Return why this Python cannot run bundles: without its global lock no test has run; None: it can."""
    if getattr(sys, "_is_gil_enabled", lambda: True)():
        return None
    return (
        "this Python runs without its global interpreter lock, and nothing is tested without it: start it with "
        "`-X gil=1`, or set PYTHON_GIL=1"
    )
