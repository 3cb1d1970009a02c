"""Dtypes of results, as they follow from those of arguments. No torch, whose fake tensors take 0.2 ms an operator.

Engines take no dtype from metadata that these rules do not prove (`execution/functional_graph.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cache, lru_cache
from typing import NamedTuple

from aotexport_runtime.allowed.signatures import Parameter, Signature, signature_of
from aotexport_runtime.schema.graph import Node
from aotexport_runtime.schema.values import Argument, DTypeArgument, SequenceMeta, TensorMeta
from aotexport_runtime.validate.arguments import Values, elements, kind_of

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


def result_dtypes(node: Node, schema: str | None, values: Values) -> str | tuple[str, ...] | None:
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
    first = next(_tensors(node.args, values), None)
    if first is None or rule.kind == "same":
        return first
    if rule.kind == "bool":
        # `all` and `any` of bytes give bytes.
        return None if first == "uint8" else "bool"
    return _computed(rule, arguments, values)


def wrong_dtype(node: Node, schema: str | None, values: Values) -> str | None:
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


def _computed(rule: Rule, arguments: dict[str, Argument], values: Values) -> str | tuple[str, ...] | None:
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


def _promoted(rule: Rule, arguments: dict[str, Argument], values: Values) -> str | None:
    """Return the one dtype of the greatest category; None: there are several there, or a number decides."""
    dtypes, numbers = set[str](), set[str]()
    for parameter in rule.signature.positional:
        argument = arguments.get(parameter.name)
        if argument is None or parameter.name == "condition":
            continue
        kind, found = kind_of(argument, values), set(_tensors([argument], values))
        if kind == "sequence":
            return None
        dtypes |= found
        if not found and (parameter.type.startswith("Tensor") or parameter.name in _OPERANDS):
            numbers.add(kind)
    categories = {category_of(dtype) for dtype in dtypes}
    if not dtypes or not numbers.issubset(_CATEGORIES):
        return None
    greatest = _greatest(categories)
    decides = greatest != _greatest(categories | numbers) or (greatest == "complex" and "float" in categories | numbers)
    several = [dtype for dtype in dtypes if category_of(dtype) == greatest]
    return several[0] if len(several) == 1 and not decides else None


def _greatest(categories: Iterable[str]) -> str:
    return max(categories, key=_CATEGORIES.index)


def _tensors(arguments: list[Argument], values: Values) -> Iterator[str]:
    """Yield the dtypes of the tensors among arguments, in order."""
    for argument in arguments:
        for each in elements(argument):
            meta = values[each] if isinstance(each, str) else None
            if isinstance(meta, TensorMeta):
                yield meta.dtype
