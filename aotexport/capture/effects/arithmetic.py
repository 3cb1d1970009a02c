"""Patch Python's functions of numbers to take symbolic ones while a model runs under tracing.

Python's `len`, `max` and others ask a symbol for the example's value, which would hold every call to it. They are
patched in the model's own modules, `math` everywhere.
"""

from __future__ import annotations

import builtins
import contextlib
import functools
import math
import sys
from collections.abc import Callable, Iterator
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import nn

from aotexport.capture.effects.sizes_as_integers import SizesAsIntegers, holds_symbol
from aotexport.model.source_lines import is_user_file
from aotexport.model.tensor_kinds import class_of
from aotexport.process.objects import file_of, is_a, namespace_of
from aotexport.process.patches import Patch, caller, in_this_thread, patched
from aotexport.torch_internals.names import MATH_FUNCTIONS
from aotexport.torch_internals.subgraphs import bodies_compiled_without
from aotexport.torch_internals.tracing import UnpausedMode

_REASON = "Let functions of numbers take symbolic ones"
_PLANNERS = ("opt_einsum.",)
"""Begins of names of modules that read sizes only to plan: whatever they are, the plan gives the result."""
_SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)
_SYMBOLIC_TYPES: dict[type, tuple[type, ...]] = {
    int: (torch.SymInt, torch.SymBool),
    bool: (torch.SymBool,),
    float: (torch.SymFloat,),
}


@contextlib.contextmanager
def symbolic_arithmetic(
    target: nn.Module | Callable[..., Any],
    module: nn.Module | None,
    asked: Callable[[], None] = lambda: None,
    written: Callable[[], int | None] = lambda: None,
) -> Iterator[None]:
    """Let the code of a model compute with symbolic sizes and integers as if they were numbers.

    Args:
        target: the traced callable.
        module: its module; None: a plain function.
        asked: called where the model's own code asks for the value of a symbolic number (`range(size)`), which holds
            calls to the example's value.
        written: called where it makes text of one; returns what to add to the example's value, or None, which holds
            calls to it.
    """
    spaces = _namespaces(_functions(target, module))
    builtin = [
        Patch([each for each in spaces if name not in each], name, in_this_thread(new, vars(builtins)[name]), _REASON)
        for name, new in _BUILTINS.items()
    ]
    plain = bodies_compiled_without(SizesAsIntegers, UnpausedMode)
    with patched(*builtin, *_attributes(written), *_conversions(asked), plain), SizesAsIntegers():
        yield


def _functions(target: Any, module: nn.Module | None) -> list[Any]:
    """Return the traced callable, and the attributes of the classes of the model."""
    classes = {base for child in (module.modules() if module is not None else ()) for base in type(child).__mro__}
    return [value for cls in classes for value in vars(cls).values()] + [
        target,
        target.__func__ if is_a(target, MethodType) else None,
    ]


def _namespaces(functions: list[Any]) -> list[dict[str, Any]]:
    """Return the globals of the model's own modules, and of the packages that hold these."""
    own = {id(space): space for each in functions if type(each) is FunctionType and (space := each.__globals__)}
    own = {key: space for key, space in own.items() if is_user_file(space.get("__file__") or "")}
    packages = {str(space.get("__name__", "")).partition(".")[0] for space in own.values()}
    within = tuple(f"{package}." for package in packages)
    for name, loaded in list(sys.modules.items()):
        if (name in packages or name.startswith(within)) and is_user_file(file_of(loaded)):
            own[id(namespace_of(loaded))] = namespace_of(loaded)
    return list(own.values())


def _len(value: Any) -> Any:
    return value.shape[0] if is_a(value, torch.Tensor) and value.dim() else len(value)


def _isinstance(value: Any, types: Any) -> bool:
    if isinstance(value, types) or (isinstance(value, torch.Tensor) and issubclass(class_of(value), types)):
        return True
    if not isinstance(value, _SYMBOLIC):
        return False
    listed = types if isinstance(types, tuple) else (types,)
    return any(type(value) in _SYMBOLIC_TYPES.get(type_, ()) for type_ in listed if isinstance(type_, type))


def _divmod(a: Any, b: Any) -> Any:
    return (a // b, a % b) if holds_symbol((a, b)) else divmod(a, b)


def _extreme(symbolic: Callable[[Any, Any], Any], original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def extreme(*args: Any, **kwargs: Any) -> Any:
        values = args[0] if len(args) == 1 and isinstance(args[0], list | tuple) else args
        # Python compares a tensor by its value.
        if kwargs or not all(isinstance(each, (int, float, *_SYMBOLIC)) for each in values) or not holds_symbol(values):
            return original(*args, **kwargs)
        return functools.reduce(symbolic, values)

    return extreme


_BUILTINS: dict[str, Callable[..., Any]] = {
    "len": _len,
    "isinstance": _isinstance,
    "divmod": _divmod,
    "max": _extreme(torch.sym_max, max),
    "min": _extreme(torch.sym_min, min),
}


def _attributes(written: Callable[[], int | None]) -> Iterator[Patch]:
    """Yield patches that let functions of numbers take symbolic ones."""
    for name, symbolic in MATH_FUNCTIONS.items():
        yield Patch(math, name, _one_of(getattr(math, name), symbolic), _REASON)
    yield Patch(math, "log", _logarithm(math.log), _REASON)
    # `affine_grid` asks for the least size.
    yield Patch(vars(torch.nn.functional), "min", in_this_thread(_BUILTINS["min"], min), _REASON)
    for name in ("__repr__", "__format__"):
        yield Patch(
            torch.SymInt, name, _text(name, written), "Hold calls to a size that the model's code makes text of"
        )


def _one_of(original: Callable[[Any], Any], symbolic: Callable[[Any], Any]) -> Callable[[Any], Any]:
    @functools.wraps(original)
    def function(value: Any) -> Any:
        return symbolic(value) if holds_symbol(value) else original(value)

    return function


def _logarithm(original: Callable[..., float]) -> Callable[..., Any]:
    def logarithm(value: Any, base: Any = math.e) -> Any:
        if not holds_symbol((value, base)):
            return original(value) if base is math.e else original(value, base)
        return MATH_FUNCTIONS["log2"](value) / (MATH_FUNCTIONS["log2"](base) if holds_symbol(base) else math.log2(base))

    return logarithm


def _conversions(asked: Callable[[], None]) -> Iterator[Patch]:
    """Yield patches of the methods by which Python asks for the value of a symbolic number."""
    integer, number = torch.SymInt, torch.SymFloat
    asking = ((integer, "__int__"), (integer, "__index__"), (number, "__int__"), (number, "__float__"))
    for type_, name in asking:
        yield Patch(
            type_, name, _watched(getattr(type_, name), asked), "Record that the model asks for a size as a number"
        )


def _watched(original: Callable[[Any], Any], asked: Callable[[], None]) -> Callable[[Any], Any]:
    def convert(self: Any) -> Any:
        frame = caller()
        if frame.f_globals.get("__name__", "").startswith(_PLANNERS) and self.node.hint is not None:
            return self.node.hint
        if self.node.maybe_as_int() is None and is_user_file(frame.f_code.co_filename):
            asked()
        return original(self)

    return convert


def _text(name: str, written: Callable[[], int | None]) -> Callable[..., str]:
    original = getattr(torch.SymInt, name)

    def text(self: torch.SymInt, *spec: str) -> str:
        """Say a number where the model's code makes text that it may compute with."""
        if is_user_file(caller().f_code.co_filename):
            hint: int | None = self.node.hint
            added = None if hint is None else written()
            return getattr(builtins.int, name)(int(self) if hint is None or added is None else hint + added, *spec)
        return original(self, *spec)

    return text
