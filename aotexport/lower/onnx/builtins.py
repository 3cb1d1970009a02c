"""Python's builtins on sizes, as functions that tracers of symbolic sizes know."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import torch

_OPERATORS = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "eq", "ne", "lt", "le", "gt", "ge")

BUILTINS: dict[str, Callable[..., Any]] = {
    **{f"python::{name}": getattr(operator, name) for name in _OPERATORS},
    **{f"python::{name}": getattr(operator, name) for name in ("neg", "abs", "xor", "lshift", "rshift", "getitem")},
    "python::and": operator.and_,
    "python::or": operator.or_,
    "python::not": torch.sym_not,
    "python::sym_sum": torch.sym_sum,
    "python::sym_max": torch.sym_max,
    "python::sym_min": torch.sym_min,
    "python::sym_int": torch.sym_int,
    "python::sym_float": torch.sym_float,
    "python::sym_ite": torch.sym_ite,
    "python::floor": math.floor,
    "python::ceil": math.ceil,
    "python::round": round,
    "python::sqrt": torch.sym_sqrt,
}
"""Functions by name of the builtin in a graph; other builtins have no translation."""

SIZE_OPERATORS: dict[str, Callable[..., Any]] = {
    "add": operator.add,
    "mul": operator.mul,
    "floordiv": operator.floordiv,
    "mod": operator.mod,
    "pow": operator.pow,
    "min": torch.sym_min,
    "max": torch.sym_max,
    "ceildiv": lambda a, b: -(-a // b),
}
"""Functions by operator of a size expression."""

COMPARISONS = {f"python::{name}": name for name in ("eq", "ne", "lt", "le", "gt", "ge")}
"""Comparisons of `aten`, by name of the builtin."""
