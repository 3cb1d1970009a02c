"""The names that a graph may call, and their operands. No torch.

`aten` operators must be of an operator set of `allowed/aten.txt`, which `schemas/tools/operators.py` writes;
`python::` and `torch::` names are in the tables below; the caller allows other namespaces.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable
from functools import cache
from typing import Any

from aotexport_runtime.errors import CheckFailed

INT64_MAX = (1 << 63) - 1

SET_HEAD = "# set "
"""What begins the line of an operator set in `allowed/aten.txt`."""


def _text_of(file: str) -> str:
    # Not at import: it takes milliseconds, and ONNX models do not need the lists.
    from importlib import resources

    return resources.files("aotexport_runtime").joinpath(file).read_text(encoding="ascii")


@cache
def kinds_in(file: str) -> dict[str, str]:
    """Return the kind of each base name of an operator, or name with overload, in a table `kind: name name ...`."""
    rows = (line.partition(": ") for line in _text_of(file).splitlines() if not line.startswith("#"))
    return {name: kind for kind, _, names in rows for name in names.split()}


@cache
def operator_sets() -> dict[str, dict[str, str]]:
    """Return the signatures that each operator set adds to the one before it, by `base.overload`; oldest set first."""
    return read_sets(_text_of("allowed/aten.txt"))


def read_sets(text: str) -> dict[str, dict[str, str]]:
    """Return the operator sets in the text of `allowed/aten.txt`: a line per set, then one per signature."""
    sets: dict[str, dict[str, str]] = {}
    rows: dict[str, str] = {}
    for line in text.splitlines():
        if line.startswith("aten::"):
            name = line[6 : line.index("(")]
            rows[name if "." in name else f"{name}.default"] = line
        elif line.startswith(SET_HEAD):
            rows = sets.setdefault(line.removeprefix(SET_HEAD), {})
    return sets


@cache
def aten_signatures() -> dict[str, str]:
    """Return the signature of every operator of the newest operator set, by `base.overload`."""
    return {name: signature for rows in operator_sets().values() for name, signature in rows.items()}


@cache
def allowed_aten_operators() -> frozenset[str]:
    """Return the `aten` operators that a bundle may call, as `base.overload`."""
    return frozenset(aten_signatures())


INFIX: dict[str, str] = {
    "python::add": "+",
    "python::sub": "-",
    "python::mul": "*",
    "python::truediv": "/",
    "python::floordiv": "//",
    "python::mod": "%",
    "python::pow": "**",
    "python::eq": "==",
    "python::ne": "!=",
    "python::lt": "<",
    "python::le": "<=",
    "python::gt": ">",
    "python::ge": ">=",
    "python::and": "&",
    "python::or": "|",
    "python::xor": "^",
    "python::lshift": "<<",
    "python::rshift": ">>",
}
"""Builtins on two numbers, by the sign that generated code writes for them."""

FLOAT_FUNCTIONS = ("sqrt", "log2", "cos", "cosh", "sin", "sinh", "tan", "tanh", "acos", "asin", "atan")
"""Functions of `math` from a number to a float."""


def whole(function: Callable[[Any], Any], error: Callable[[str], Exception]) -> Callable[[Any], Any]:
    """Return a function from a float to an integer of at most 64 bits; others are refused by an error."""

    def call(value: Any) -> Any:
        result = function(value)
        if type(result) is int and abs(result) > INT64_MAX:
            raise error("a number of the graph has more than 64 bits")
        return result

    return call


def _round_digits(value: Any, digits: Any) -> Any:
    # Python computes a power of ten of as many digits for integers.
    return round(value, max(digits, -400) if type(value) is int and type(digits) is int else digits)


def sym_max(*values: Any) -> Any:
    """Return the greatest, a float where one is, as torch does; symbolic where one is: the call derives a bundle."""
    return _extreme("__sym_max__", max, values)


def sym_min(*values: Any) -> Any:
    """Return the least; see `sym_max`."""
    return _extreme("__sym_min__", min, values)


def _extreme(method: str, plain: Callable[..., Any], values: tuple[Any, ...]) -> Any:
    symbolic = next((value for value in values if hasattr(value, method)), None)
    if symbolic is None:
        return float(plain(values)) if float in map(type, values) else plain(values)
    others = (value for value in values if value is not symbolic)
    return functools.reduce(lambda value, other: getattr(value, method)(other), others, symbolic)


BUILTINS: dict[str, Callable[..., Any]] = {
    "python::getitem": operator.getitem,
    "python::neg": operator.neg,
    "python::not": operator.not_,
    "python::sym_sum": sum,
    "python::sym_max": sym_max,
    "python::sym_min": sym_min,
    "python::sym_int": whole(int, CheckFailed),
    "python::sym_float": float,
    "python::sym_ite": lambda condition, yes, no: yes if condition else no,
    "python::abs": abs,
    "python::floor": whole(math.floor, CheckFailed),
    "python::ceil": whole(math.ceil, CheckFailed),
    "python::round": whole(round, CheckFailed),
    "python::round_digits": _round_digits,
    **{f"python::{name}": getattr(math, name) for name in FLOAT_FUNCTIONS},
}
"""Builtins that generated code calls."""

LAUNCH = "higher_order::triton_kernel"
"""The launch of a kernel of the model."""

_LOOP = ("a body", "a body", "an array", "an array")
OPERANDS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys((*BUILTINS,), ("a number",)),
    **dict.fromkeys((*INFIX, "python::sym_max", "python::sym_min", "python::round_digits"), ("a number", "a number")),
    "python::getitem": ("a sequence", "an integer or a slice"),
    "python::sym_sum": ("an array of numbers",),
    "python::sym_ite": ("a number", "a number", "a number"),
    "torch::is_grad_enabled": (),
    "torch::set_grad_enabled": ("a grad mode",),
    "torch::enter_autocast": ("a device", "a dtype or null", "a truth value", "a truth value"),
    "torch::exit_autocast": ("a region",),
    "torch::enter_checkpoint": ("an array of tensors", "a truth value"),
    "torch::exit_checkpoint": ("a region",),
    "higher_order::cond": ("a predicate", "a body", "a body", "an array"),
    "higher_order::while_loop": _LOOP,
    "higher_order::while_loop_stack_output": _LOOP,
    "higher_order::scan": ("a body", "an array", "an array", "an array"),
    "higher_order::map_impl": ("a body", "an array", "an array"),
    "higher_order::invoke_subgraph": ("a body", "an array"),
    "higher_order::register_hook": ("a body", "a tensor", "an array"),
    "higher_order::autograd_function": (
        *("a body", "an array of bodies and null", "an array", "an array", "a count", "a count"),
        *("an array of indices", "an array of indices", "a truth value", "a truth value"),
    ),
    LAUNCH: ("a string", "an array of tensors"),
    "subclass::inner": ("a tensor", "a string"),
    "subclass::wrap": ("an array of tensors", "the index of a structure"),
    "distributed::from_local": ("a tensor", "the index of a structure", "an array of placements or null"),
    "distributed::to_local": ("a tensor", "an array of placements or null"),
    "distributed::redistribute": ("a tensor", "an array of placements", "a dtype or null", "a dtype or null"),
}
"""What each operand is of the operators that are not torch's, in words: `validate/builtins.py` has a rule for each."""

KERNEL = "kernel::"
"""What begins the names of kernels in lowered graphs."""

NAMESPACES = frozenset(name.partition("::")[0] for name in OPERANDS)
"""Namespaces of `OPERANDS`, which no custom operator may be in."""

VIEWS = frozenset(
    (
        *("_conj", "_neg_view", "alias", "as_strided", "detach", "diagonal", "expand", "permute", "select", "slice"),
        *("squeeze", "t", "transpose", "unfold", "unsqueeze", "view", "view_as_complex", "view_as_real"),
    )
)
"""Base names of operators that may regenerate an output: they return views of their first argument."""
