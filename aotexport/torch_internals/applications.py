"""Watch where custom autograd functions are applied; models bind the method (`apply = F.apply`).

To torch 2.13 it is a method of Python, whose code can be replaced. From torch 2.14 on it is native: the attribute is
replaced, and what modules have bound; other uses of it are refused.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from types import BuiltinFunctionType, CodeType, FunctionType
from typing import Any

import torch
from torch.autograd.function import FunctionMeta

from aotexport.process.objects import namespace_of
from aotexport.process.patches import Patch, in_this_thread, patched

Apply = Callable[..., Any]
Instead = Callable[[Any, tuple[Any, ...], dict[str, Any], Apply], Any]

_REASON = "Record where custom autograd functions are applied"
_WATCH = "_aotexport_applied"


def applied_functions(
    apply_instead: Instead, refuse: Callable[[type], None], tables: Iterable[dict[str, Any]] = ()
) -> contextlib.AbstractContextManager[None]:
    """Call `apply_instead` for applications of custom autograd functions, with class, arguments and torch's `apply`.

    `refuse` raises an error for a class whose `apply` the model has bound where it cannot be replaced. `tables` are
    attributes of objects that may hold a bound `apply`, beside modules'.
    """
    apply: Any = vars(torch.autograd.Function)["apply"]
    if isinstance(apply, classmethod):
        changes = _of_code(apply.__func__, apply_instead)
    else:
        changes = _of_attributes(apply, apply_instead, refuse, tables)
    return changes


def bound_class(value: Any) -> type | None:
    """Return the class whose native `apply` a value is; None: it is something else."""
    is_apply = type(value) is BuiltinFunctionType and value.__name__ == "apply"
    return value.__self__ if is_apply and isinstance(value.__self__, FunctionMeta) else None


def called_by_class(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that looks up `apply` of the class at each call, for a bound one; others as they are."""
    cls: Any = bound_class(function)
    if cls is None:
        return function

    def apply(*args: Any, **kwargs: Any) -> Any:
        return cls.apply(*args, **kwargs)

    return apply


def _of_code(apply: Any, apply_instead: Instead) -> contextlib.AbstractContextManager[None]:
    """Replace the code of the method, which bound ones share."""
    original = FunctionType(apply.__code__, apply.__globals__, apply.__name__, apply.__defaults__, apply.__closure__)

    def watch(cls: type, *args: Any, **kwargs: Any) -> Any:
        return apply_instead(cls, args, kwargs, original)

    return patched(
        Patch(apply.__globals__, _WATCH, in_this_thread(watch, original), _REASON),
        Patch(apply, "__code__", _watched(), _REASON),
    )


def _watched() -> CodeType:
    """Return code that calls the watcher of `Function.apply`, with the same free variable as the method."""
    __class__ = torch.autograd.Function

    def apply(cls: type, *args: Any, **kwargs: Any) -> Any:
        assert __class__ is not None
        return _aotexport_applied(cls, *args, **kwargs)  # type: ignore[name-defined]  # noqa: F821

    return apply.__code__


@contextlib.contextmanager
def _of_attributes(
    apply: Any, apply_instead: Instead, refuse: Callable[[type], None], tables: Iterable[dict[str, Any]]
) -> Iterator[None]:
    """Replace the attribute `apply` and the bound ones in tables; notice others by what the native code reads."""
    watched_classes = _BackwardClasses(refuse)

    def original(cls: type, *args: Any, **kwargs: Any) -> Any:
        with watched_classes.expected(cls):
            return apply.__get__(None, cls)(*args, **kwargs)

    def watch(cls: type, *args: Any, **kwargs: Any) -> Any:
        return apply_instead(cls, args, kwargs, original)

    watched = in_this_thread(watch, original)
    modules = map(namespace_of, list(sys.modules.values()))
    bound = [
        Patch(table, name, functools.partial(watched, cls), _REASON)
        for table in (*modules, *tables)
        if type(table) is dict
        for name, value in list(table.items())
        if (cls := bound_class(value)) is not None
    ]
    reason = "Refuse applications of custom autograd functions that nothing else shows"
    try:
        with patched(
            Patch(torch.autograd.Function, "apply", classmethod(watched), _REASON),
            Patch(FunctionMeta, "_backward_cls", property(watched_classes.read, watched_classes.write), reason),
            *bound,
        ):
            yield
    finally:
        watched_classes.keep()


class _BackwardClasses:
    """The classes of autograd nodes of custom functions, which the native `apply` reads once per application."""

    def __init__(self, refuse: Callable[[type], None]) -> None:
        self._refuse = refuse
        self._thread = threading.get_ident()
        self._expected: list[type] = []
        self._made: dict[type, Any] = {}

    @contextlib.contextmanager
    def expected(self, cls: type) -> Iterator[None]:
        """Let the next application of `cls` pass."""
        before = len(self._expected)
        self._expected.append(cls)
        try:
            yield
        finally:
            del self._expected[before:]

    def read(self, cls: type) -> Any:
        """Return the class, or refuse an application that was not expected."""
        if self._expected and self._expected[-1] is cls:
            self._expected[-1] = object
        elif threading.get_ident() == self._thread:
            self._refuse(cls)
        if cls in self._made:
            return self._made[cls]
        return next(vars(base)["_backward_cls"] for base in cls.__mro__ if "_backward_cls" in vars(base))

    def write(self, cls: type, value: Any) -> None:
        """Remember the class of a function that is defined meanwhile."""
        self._made[cls] = value

    def keep(self) -> None:
        """Give functions that were defined meanwhile their classes."""
        for cls, value in self._made.items():
            cls._backward_cls = value  # type: ignore[attr-defined]
