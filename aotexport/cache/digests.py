"""Digest Python objects by their whole content: everything within reach, its structure and shared parts.

Two graphs of objects have equal digests only if their contents are equal. Code that is installed is told by its name:
its files are digested apart. An object whose content cannot be read is refused, never passed over.
"""

from __future__ import annotations

import contextlib
import copyreg
import functools
import hashlib
import logging
import sys
import threading
import types
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy
import torch

from aotexport.cache.files import is_installed, is_installed_module
from aotexport.cache.tensors import array_parts, storage_bytes, tensor_parts
from aotexport.model.refusals import raised_by_wrong_code

Parts = Iterator[Any]


class NotDigestible(Exception):
    """An object has content that nothing here reads; the message names its type."""


class Text(str):
    """A piece of a digest that is no object of its own: a label, or a number as text."""


def digest_of(roots: Mapping[str, Any], root: Path) -> str:
    """Return the digest of objects and of everything within their reach.

    Args:
        roots: the objects, by name.
        root: directory that names of files in code are relative to.

    Raises:
        NotDigestible: an object has content that cannot be read.
    """
    return _Digest(root).of(roots)


class _Digest:
    """Writes each object once, in the order in which they are found, with numbers for its parts."""

    def __init__(self, root: Path) -> None:
        self._root = f"{root}/"
        self._hash = hashlib.sha256()
        self._numbers: dict[int, int] = {}
        # Objects are kept alive, so that no other gets their id.
        self._pending: list[Any] = []

    def of(self, roots: Any) -> str:
        self._number(roots)
        for value in self._pending:
            try:
                for part in self._parts(value):
                    self._write(part)
            except NotDigestible:
                raise
            except Exception as error:  # code of any class runs here
                if raised_by_wrong_code(error):
                    raise
                raise NotDigestible(f"an object of `{_name(type(value))}` ({type(error).__name__}: {error})") from error
            self._hash.update(b"\n")
        return self._hash.hexdigest()

    def _write(self, part: Any) -> None:
        if type(part) is Text:
            text = part
        elif type(part) in _SCALARS:
            text = f"{type(part).__name__}:{part!r}"
        elif type(part) is float:
            text = f"float:{part.hex()}"
        else:
            text = f"#{self._number(part)}"
        encoded = text.encode("utf-8", "surrogatepass")
        self._hash.update(b"%d:" % len(encoded) + encoded)

    def _number(self, value: Any) -> int:
        number = self._numbers.setdefault(id(value), len(self._pending))
        if number == len(self._pending):
            self._pending.append(value)
        return number

    def _parts(self, value: Any) -> Parts:
        """Yield the type of an object and its parts: scalars, texts and further objects."""
        kind = type(value)
        known = _KNOWN.get(kind)
        if known is not None:
            yield Text(kind.__qualname__)
            yield from known(value)
        elif isinstance(value, type):
            yield from self._class(value)
        elif kind is types.FunctionType:
            yield from self._function(value)
        elif kind is types.CodeType:
            yield from self._code(value)
        elif kind in (set, frozenset):
            yield from self._set(value)
        elif isinstance(value, logging.Logger):
            yield Text(f"logger {value.name}")
        else:
            yield kind
            yield from self._instance(value)

    def _instance(self, value: Any) -> Parts:
        content = _layout(type(value))
        if content is _TENSOR:
            yield from tensor_parts(value)
        elif content in (set, frozenset):
            yield from self._set(value)
        elif content in _CONTENTS:
            yield from _CONTENTS[content](value)
        elif content is not object:
            yield from _reduced(value)
        yield from _attributes(value)

    def _set(self, value: Any) -> Parts:
        # Strings have other hashes in each process.
        yield Text("set")
        yield from sorted(value, key=lambda item: _Digest(Path(self._root)).of([item]))

    def _class(self, value: type) -> Parts:
        yield Text(f"class {_name(value)}")
        if _is_known_by_name(value):
            return
        yield type(value)
        yield from value.__bases__
        for name, item in vars(value).items():
            if name not in _NOT_OF_CLASSES:
                yield name
                yield item

    def _function(self, value: types.FunctionType) -> Parts:
        yield Text(f"function {_name(value)}")
        if _is_known_by_name(value):
            return
        yield value.__code__
        yield value.__defaults__
        yield value.__kwdefaults__
        yield value.__closure__
        yield value.__dict__
        if not is_installed(value.__code__.co_filename):
            names = sorted(_names(value.__code__))
            for name in names:
                if name in value.__globals__:
                    yield name
                    yield from _of_global(value.__globals__[name], names)

    def _code(self, value: types.CodeType) -> Parts:
        yield Text(value.co_filename.removeprefix(self._root))
        for name in _OF_CODE:
            yield getattr(value, name)


def _of_global(value: Any, names: Iterable[str]) -> Parts:
    """Yield a global of the user's code; of a module of the user, those of its globals that the code may read."""
    yield value
    if isinstance(value, types.ModuleType) and not is_installed_module(value):
        for name in names:
            if name in vars(value):
                yield name
                yield vars(value)[name]


def _names(code: types.CodeType) -> set[str]:
    nested = [_names(constant) for constant in code.co_consts if isinstance(constant, types.CodeType)]
    return set(code.co_names).union(*nested)


def _attributes(value: Any) -> Parts:
    with contextlib.suppress(TypeError):
        for name, item in vars(value).items():
            yield name
            yield item
    for base in type(value).__mro__:
        for name, slot in vars(base).items():
            if isinstance(slot, types.MemberDescriptorType) and "__slots__" in vars(base):
                with contextlib.suppress(AttributeError):
                    yield name
                    yield slot.__get__(value)


def _reduced(value: Any) -> Parts:
    """Yield what an object of a class not written in Python says of itself to be copied."""
    reduce = copyreg.dispatch_table.get(type(value))
    found = reduce(value) if reduce is not None else value.__reduce_ex__(4)
    if isinstance(found, str):
        yield Text(f"{type(value).__module__}.{found}")
        return
    for part in found:
        yield list(part) if isinstance(part, Iterator) else part


def _layout(kind: type) -> type:
    """Return the class in which the memory of objects is laid out: `object`, or a base that is not written in Python.

    Classes written in Python add a dict, a list of weak references and slots to the memory of their base.
    """
    while kind is not object and kind.__base__ is not None:
        base = kind.__base__
        slots = vars(kind).get("__slots__", ())
        added = len([slots] if isinstance(slots, str) else [name for name in slots if name[:2] != "__"])
        added += kind.__weakrefoffset__ > 0 and not base.__weakrefoffset__
        added += kind.__dictoffset__ > 0 and not base.__dictoffset__
        is_python = kind.__flags__ & _MADE_BY_PYTHON == _HEAP and kind.__itemsize__ == base.__itemsize__
        if not is_python or kind.__basicsize__ != base.__basicsize__ + added * _WORD:
            return kind
        kind = base
    return kind


_HEAP, _IMMUTABLE = 1 << 9, 1 << 8
_MADE_BY_PYTHON = _HEAP | _IMMUTABLE
"""Flags of classes: made while Python runs, and closed to changes, which a class statement never makes one."""
_WORD = 8
_TENSOR = torch.Tensor.__base__


def _is_known_by_name(value: Any) -> bool:
    """Return whether a class or function is that of an installed module which its name says."""
    module = sys.modules.get(value.__module__ or "")
    if module is None or not is_installed_module(module):
        return False
    with contextlib.suppress(AttributeError):
        return functools.reduce(getattr, value.__qualname__.split("."), module) is value
    return False


def _name(value: Any) -> str:
    return f"{value.__module__}.{value.__qualname__}"


def _pairs(table: Any) -> Parts:
    # A subclass may return other items than it holds.
    for key in OrderedDict.__iter__(table) if isinstance(table, OrderedDict) else dict.__iter__(table):
        yield key
        yield dict.__getitem__(table, key)


def _repr(value: Any) -> Parts:
    yield Text(repr(value))


def _nothing(value: Any) -> Parts:
    yield from ()


def _named(value: Any) -> Parts:
    owner = getattr(value, "__self__", None) or getattr(value, "__objclass__", None)
    yield Text(value.__qualname__)
    yield Text(str(value.__module__)) if owner is None or isinstance(owner, types.ModuleType) else owner


def _get(*names: str) -> Callable[[Any], Parts]:
    def parts(value: Any) -> Parts:
        for name in names:
            yield getattr(value, name)

    return parts


def _cell(value: Any) -> Parts:
    with contextlib.suppress(ValueError):  # It is empty yet.
        yield value.cell_contents


_SCALARS = frozenset((type(None), bool, int, str, bytes, complex, type(Ellipsis), type(NotImplemented)))
_CONTENTS: dict[type, Callable[[Any], Parts]] = {
    dict: _pairs,
    OrderedDict: _pairs,
    defaultdict: lambda value: iter([value.default_factory, *_pairs(value)]),
    list: list.__iter__,
    tuple: tuple.__iter__,
    deque: lambda value: iter([value.maxlen, *value]),
    int: lambda value: iter([int(value)]),
    str: lambda value: iter([str.__str__(value)]),
    bytes: lambda value: iter([bytes(value)]),
    float: lambda value: iter([float(value)]),
    complex: lambda value: iter([complex(value)]),
    bytearray: lambda value: iter([bytes(value)]),
    weakref.ref: lambda value: iter([value()]),
    numpy.ndarray: array_parts,
}
"""Classes not written in Python, by what objects hold; also of classes derived from them."""
_KNOWN: dict[type, Callable[[Any], Parts]] = {
    dict: _pairs,
    list: list.__iter__,
    tuple: tuple.__iter__,
    torch.Size: tuple.__iter__,
    torch.dtype: _repr,
    torch.layout: _repr,
    torch.memory_format: _repr,
    torch.device: _repr,
    torch.Generator: lambda value: iter([value.device, value.get_state()]),
    torch.UntypedStorage: lambda value: iter([Text(hashlib.sha256(storage_bytes(value)).hexdigest())]),
    range: _repr,
    slice: _get("start", "stop", "step"),
    types.ModuleType: lambda value: iter([Text(value.__name__)]),
    types.MethodType: _get("__func__", "__self__"),
    types.CellType: _cell,
    types.BuiltinFunctionType: _named,
    types.MethodDescriptorType: _named,
    types.WrapperDescriptorType: _named,
    types.MethodWrapperType: _named,
    types.ClassMethodDescriptorType: _named,
    types.GetSetDescriptorType: _named,
    types.MemberDescriptorType: _named,
    types.MappingProxyType: lambda value: iter([dict(value)]),
    property: _get("fget", "fset", "fdel"),
    staticmethod: _get("__func__"),
    classmethod: _get("__func__"),
    functools.partial: _get("func", "args", "keywords", "__dict__"),
    functools._lru_cache_wrapper: _get("__wrapped__"),
    type(threading.Lock()): _nothing,
    type(threading.RLock()): _nothing,
}
"""Classes whose objects have no further attributes, by their parts."""
_OF_CODE = (
    "co_code",
    "co_consts",
    "co_names",
    "co_varnames",
    "co_freevars",
    "co_cellvars",
    "co_flags",
    "co_argcount",
    "co_posonlyargcount",
    "co_kwonlyargcount",
    "co_name",
    "co_qualname",
    "co_firstlineno",
    "co_linetable",
    "co_exceptiontable",
)
_NOT_OF_CLASSES = frozenset(
    (
        "__dict__",
        "__weakref__",
        "__doc__",
        "__annotations__",
        "__annotate__",
        "__annotate_func__",
        "__annotations_cache__",
        "_abc_impl",
    )
)
"""Attributes of classes that say nothing about what their objects do."""
