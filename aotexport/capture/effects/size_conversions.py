"""Let calls of `int` and `float` in a model's code keep symbolic numbers, while it runs under tracing.

Both ask a symbol for the example's value, which would hold every call to it. No name can be put over them, since code
also compares types with them (`type(x) is int`): they are replaced where the bytecode calls them, and nowhere else.
"""

from __future__ import annotations

import dis
import functools
import itertools
import math
import operator
import sys
from collections.abc import Callable, Iterable, Iterator
from types import CodeType, FunctionType, MethodType
from typing import Any

import torch

from aotexport.model.source_lines import is_user_file
from aotexport.process.patches import Patch, in_this_thread

_REASON = "Let `int` and `float` keep symbolic numbers"
_INSIDE = {property: "fget", staticmethod: "__func__", classmethod: "__func__", MethodType: "__func__"}
_BYTE = 0xFF


def calls_replaced(values: Iterable[Any]) -> Iterator[Patch]:
    """Yield patches of the functions of users' files among values of namespaces that call `int` or `float`.

    The replacements are constants of the new code, so that what still runs it when the patches are gone (a generator, a
    closure, another thread) finds them.
    """
    by_name = {type_.__name__: in_this_thread(_keeping(type_), type_) for type_ in (int, float)}
    for function in dict.fromkeys(found for value in values for found in _functions(value)):
        code = _with_calls(function.__code__, {name: by_name[name] for name in by_name.keys() - function.__globals__})
        if code is not function.__code__:
            yield Patch(function, "__code__", code, _REASON)


def _functions(value: Any) -> Iterator[FunctionType]:
    """Yield a function of a user's file, and the functions that it wraps."""
    seen: set[int] = set()
    while value is not None and id(value) not in seen:
        seen.add(id(value))
        if type(value) is FunctionType and is_user_file(value.__code__.co_filename):
            yield value
        wraps = type(value) in (FunctionType, functools._lru_cache_wrapper)
        inside = _INSIDE.get(type(value))
        value = vars(value).get("__wrapped__") if wraps else inside and getattr(value, inside)


def _with_calls(code: CodeType, by_name: dict[str, Callable[..., Any]]) -> CodeType:
    """Return code that calls functions in place of the globals of their names; the same object: it calls none."""
    inner = tuple(_with_calls(item, by_name) if isinstance(item, CodeType) else item for item in code.co_consts)
    constants, content = list(inner), bytearray(code.co_code)
    for name in sorted(by_name.keys() & set(code.co_names)) if len(constants) < _BYTE else ():
        for place in _loads_for_calls(code, name):
            content[place] = _load_constant(len(constants), place.stop - place.start)
        constants.append(by_name[name])
    if bytes(content) == code.co_code and all(map(operator.is_, inner, code.co_consts)):
        return code
    return code.replace(co_code=bytes(content), co_consts=tuple(constants))


def _loads_for_calls(code: CodeType, name: str) -> Iterator[slice]:
    """Yield where code loads a global in order to call it; the lowest bit of the argument says so."""
    for here, after in itertools.pairwise(dis.get_instructions(code)):
        if here.opname == "LOAD_GLOBAL" and here.argval == name and (arg := here.arg or 0) & 1 and arg <= _BYTE:
            yield slice(here.offset, after.offset)


def _load_constant(index: int, nbytes: int) -> bytes:
    """Return instructions that do with a constant what `LOAD_GLOBAL` does before a call, padded to its length."""
    arguments = {"LOAD_CONST": index, "PUSH_NULL": 0, "NOP": 0}
    load, push, pad = (bytes((dis.opmap[name], argument)) for name, argument in arguments.items())
    pair = load + push if sys.version_info >= (3, 13) else push + load
    return pair + pad * ((nbytes - len(pair)) // len(pad))


def _keeping(type_: type[int] | type[float]) -> Callable[..., Any]:
    def convert(*args: Any) -> Any:
        value = args[0] if len(args) == 1 else None
        if isinstance(value, torch.SymInt):
            return value if type_ is int else torch.sym_float(value)
        if isinstance(value, torch.SymFloat):
            return value if type_ is float else math.trunc(value)
        return type_(*args)

    return functools.update_wrapper(convert, type_, assigned=("__name__", "__doc__"), updated=())
