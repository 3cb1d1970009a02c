"""Dtypes of results, as they follow from those of arguments. No torch, whose fake tensors take 0.2 ms an operator.

Engines take no dtype from metadata that these rules do not prove (`execution/functional_graph.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache, lru_cache
from typing import NamedTuple

from aotexport_runtime.allowed.signatures import Parameter, Signature, signature_of
from aotexport_runtime.schema.graph import Node
from aotexport_runtime.schema.values import (
    Argument,
    ComplexArgument,
    DTypeArgument,
    FloatArgument,
    ScalarMeta,
    SequenceMeta,
    SizeArgument,
    SizeMeta,
    TensorMeta,
    ValueMeta,
)

_CATEGORIES = ("bool", "int", "float", "complex")
_OPERANDS = ("self", "other", "min", "max", "exponent")
"""Parameters whose numbers promote; `alpha`, `value` and the like are converted."""


class Rule(NamedTuple):
    """How the dtype of an operator's results follows.

    Attributes:
        kind: a word of `allowed/dtypes.txt`; empty: none.
        signature: of the operator.
        gives: the parameter that is the dtype where it is given; None: there is none.
    """

    kind: str
    signature: Signature
    gives: Parameter | None


@cache
def kinds() -> dict[str, str]:
    """Return the word of `allowed/dtypes.txt` for each base name there."""
    from importlib import resources

    text = resources.files("aotexport_runtime").joinpath("allowed/dtypes.txt").read_text(encoding="ascii")
    lines = (line.partition(": ") for line in text.splitlines() if not line.startswith("#"))
    return {name: kind for kind, _, names in lines for name in names.split()}


@lru_cache(maxsize=4096)
def rule_of(op: str, schema: str) -> Rule | None:
    """Return the rule of an `aten` operator; None: there is none."""
    base = op.removeprefix("aten::").partition(".")[0]
    signature = signature_of(schema)
    if signature is None or not op.startswith("aten::") or _writes_by_keyword(schema) or not signature.returns:
        return None
    parameters = (*signature.positional, *signature.keyword_only)
    gives = next((p for p in parameters if p.name in ("dtype", "input_dtype", "out_dtype")), None)
    if gives is not None and ("norm" in base or "powsum" in base):
        return None
    kind = kinds().get(base, "")
    if base.endswith("_") and not base.endswith("__"):
        kind = "same"
    if kind == "pair" and len(signature.returns) == 1:
        kind = "promote"
    if len(signature.returns) != {"pair": 2, "masked": 2}.get(kind, 1) and kind != "each":
        return None
    return Rule(kind, signature, gives) if kind or gives is not None else None


def _writes_by_keyword(schema: str) -> bool:
    """Return whether an operator writes to an argument that is given by keyword alone (`out`)."""
    _, _, keywords = schema.partition("*, ")
    return "!" in keywords.partition(") -> ")[0]


def result_dtypes(node: Node, schema: str | None, values: Mapping[str, ValueMeta]) -> str | tuple[str, ...] | None:
    """Return the dtype of an operator's results; where they differ, one per result; None: no rule says it.

    Args:
        node: a call that fits the signature.
        schema: the signature that the graph records; None: none.
        values: metadata of its arguments.
    """
    rule = None if schema is None else rule_of(node.op, schema)
    if rule is None:
        return None
    arguments = {p.name: a for p, a in zip(rule.signature.positional, node.args, strict=False)}
    arguments.update(node.kwargs)
    if rule.gives is not None and (given := arguments.get(rule.gives.name)) is not None:
        return given.value if isinstance(given, DTypeArgument) else None
    if rule.kind in ("", "int64"):
        return rule.kind or None
    tensors = list(_tensors(node.args, values))
    if not tensors:
        return None
    if rule.kind == "same":
        return tensors[0]
    if rule.kind == "bool":
        # `all` and `any` of bytes give bytes.
        return None if tensors[0] == "uint8" else "bool"
    return _computed(rule, arguments, values)


def wrong_dtype(node: Node, schema: str | None, values: Mapping[str, ValueMeta]) -> str | None:
    """Return which dtype an operator gives and which one its metadata say, where a rule tells them apart; else None."""
    found = result_dtypes(node, schema, values)
    if found is None:
        return None
    metas = node.meta.items if isinstance(node.meta, SequenceMeta) else (node.meta,)
    # A sequence may be one result, a list of tensors.
    expected = found if isinstance(found, tuple) else (found,) * len(metas)
    for dtype, meta in zip(expected, metas, strict=True):
        if isinstance(meta, TensorMeta) and meta.dtype != dtype:
            return f"{dtype}, and the graph says {meta.dtype}"
    return None


def _computed(
    rule: Rule, arguments: dict[str, Argument], values: Mapping[str, ValueMeta]
) -> str | tuple[str, ...] | None:
    dtype = _promoted(rule, arguments, values)
    if dtype is None or arguments.get("half_to_float") is True:
        return None
    category = category_of(dtype)
    if rule.kind == "each":
        return dtype if dtype in ("float32", "float64") else None
    if rule.kind == "sum":
        return "int64" if category in ("bool", "int") else dtype
    if rule.kind in ("float", "masked") and category in ("bool", "int"):
        return None
    if rule.kind == "real" and category == "complex":
        return None
    second = {"pair": "int64", "masked": "bool"}.get(rule.kind)
    return dtype if second is None else (dtype, second)


def category_of(dtype: str) -> str:
    """Return what kind of numbers a dtype has."""
    if dtype.startswith(("float", "bfloat")):
        return "float"
    return "int" if dtype.startswith(("int", "uint")) else dtype.rstrip("0123456789")


def _promoted(rule: Rule, arguments: dict[str, Argument], values: Mapping[str, ValueMeta]) -> str | None:
    """Return the one dtype of the greatest category; None: there are several there, or a number decides."""
    dtypes: set[str] = set()
    numbers: set[str] = set()
    for parameter in rule.signature.positional:
        if parameter.name not in arguments or parameter.name == "condition":
            continue
        argument = arguments[parameter.name]
        if isinstance(argument, str) and isinstance(values[argument], SequenceMeta):
            return None
        found = list(_tensors([argument], values))
        dtypes.update(found)
        counts = parameter.type.startswith("Tensor") or parameter.name in _OPERANDS
        if not found and counts and argument is not None:
            numbers.add(_number(argument, values))
    greatest = {name for name in dtypes if category_of(name) == _greatest(map(category_of, dtypes))}
    if len(greatest) != 1 or "" in numbers:
        return None
    (dtype,) = greatest
    above = numbers and _rank(_greatest(numbers)) > _rank(category_of(dtype))
    mixed = category_of(dtype) == "complex" and "float" in (*map(category_of, dtypes), *numbers)
    return None if above or mixed else dtype


def _rank(category: str) -> int:
    return _CATEGORIES.index(category)


def _greatest(categories: Iterator[str] | set[str] | map[str]) -> str:
    return max(categories, key=_rank, default="bool")


def _number(argument: Argument, values: Mapping[str, ValueMeta]) -> str:
    """Return the category of a number; empty: it is none, or not known."""
    if isinstance(argument, str):
        meta = values[argument]
        return meta.type if isinstance(meta, ScalarMeta) else "int" if isinstance(meta, SizeMeta) else ""
    if isinstance(argument, SizeArgument):
        return "int"
    if isinstance(argument, FloatArgument):
        return "float"
    if isinstance(argument, ComplexArgument):
        return "complex"
    return type(argument).__name__ if isinstance(argument, bool | int | float) else ""


def _tensors(arguments: list[Argument], values: Mapping[str, ValueMeta]) -> Iterator[str]:
    """Yield the dtypes of the tensors among arguments, in order."""
    for argument in arguments:
        if isinstance(argument, str):
            meta = values[argument]
            if isinstance(meta, TensorMeta):
                yield meta.dtype
        elif isinstance(argument, list):
            yield from _tensors(argument, values)
