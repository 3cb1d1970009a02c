"""Types of values and arguments, and dtypes of results: signatures that a graph records, against what the graph does.

The loader compares signatures with the running torch's. Engines take no dtype that is not proven here from metadata.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

import msgspec

from aotexport_runtime.allowed.operators import NAMESPACES, aten_signatures, kinds_in
from aotexport_runtime.allowed.signatures import Parameter, Signature, is_compatible, signature_of
from aotexport_runtime.errors import Place
from aotexport_runtime.schema.graph import Node
from aotexport_runtime.schema.values import Argument, DTypeArgument, NothingMeta, SequenceMeta, TensorMeta, ValueMeta
from aotexport_runtime.validate.arguments import NUMBERS, Values, elements, kind_of

_WHOLE = ("bool", "int")
_TAKEN: dict[str, tuple[str, ...]] = {
    # torch makes a tensor of a number.
    "Tensor": (*NUMBERS, "complex", "tensor"),
    "Scalar": (*NUMBERS, "complex"),
    "complex": (*NUMBERS, "complex"),
    "float": NUMBERS,
    **dict.fromkeys(("int", "SymInt", "bool", "SymBool"), _WHOLE),
    "str": ("string",),
    "ScalarType": ("dtype",),
    "MemoryFormat": ("memory_format",),
    **{name: (name.lower(),) for name in ("Layout", "Device")},
    "Generator": (),
}
"""Kinds that an argument of a type may be; other types are of custom operators, and for them to say."""

_GIVEN = {"Tensor": ("tensor",), "float": ("float",), **dict.fromkeys(("int", "SymInt", "bool", "SymBool"), _WHOLE)}
"""Kinds that a result of a type may be; those of other types are no tensors and no sequences."""

_UNDEFINED = {
    "aten::_scaled_dot_product_cudnn_attention_backward.default": ("attn_bias", "cum_seq_q", "cum_seq_k"),
    "aten::_scaled_dot_product_efficient_attention_backward.default": ("attn_bias",),
    "aten::_scaled_dot_product_flash_attention_backward.default": ("cum_seq_q", "cum_seq_k"),
}
"""Arguments of type `Tensor` that torch's own backward passes leave undefined (torch 2.13, `derivatives.yaml`)."""


def typed_call(node: Node, values: Values) -> tuple[Hashable, ...]:
    """Return all that `check_types` asks of a call: equal for calls that it treats alike, whose metadata are shared."""
    arguments = [_typed(argument, values) for argument in node.args]
    kwargs = [(keyword, _typed(each, values)) for keyword, each in node.kwargs.items()]
    return node.op, id(node.meta), *arguments, *kwargs


def _typed(argument: Argument, values: Values) -> Hashable:
    if isinstance(argument, str):
        return id(values[argument])
    if isinstance(argument, list):
        return tuple([_typed(item, values) for item in argument])
    return msgspec.json.encode(argument)  # Bytes have a hash that nobody can foresee.


def check_types(node: Node, schema: str | None, values: Values, here: Place, *, infers_dtypes: bool) -> None:
    """Refuse a call that does not fit the operator's signature, or whose metadata are not what it returns.

    `values` are those before the node; `infers_dtypes`: dtypes of results follow from arguments, without autocast.
    """
    if node.op.partition("::")[0] in NAMESPACES:
        return
    subject = f"operator `{node.op}`"
    signature = None if schema is None else signature_of(schema)
    if signature is None or schema is None or schema.partition("(")[0] != node.op.removesuffix(".default"):
        raise here.at("op").invalid(f"no signature of operator `{node.op[:80]}`", "operator-schema/signature")
    in_set = aten_signatures().get(node.op.removeprefix("aten::")) or schema
    if in_set != schema and not is_compatible(schema, in_set) and not is_compatible(in_set, schema):
        message = f"{subject} has another signature in its operator set: {in_set}"
        raise here.at("op").invalid(message, "operator-schema/operator-set")
    _check_arguments(node, signature, values, here)
    if not _is_result(signature.returns, node.meta) or not _is_item(node, values):
        given = ", ".join(signature.returns) or "nothing"
        raise here.at("meta").invalid(f"{subject} gives {given}, and the graph says otherwise", "result-type/signature")
    found = result_dtypes(node, schema, values) if infers_dtypes else None
    metas = node.meta.items if isinstance(node.meta, SequenceMeta) else (node.meta,)
    # A sequence may be one result, a list of tensors.
    for dtype, meta in zip(found if isinstance(found, tuple) else [found] * len(metas), metas, strict=True):
        if dtype is not None and isinstance(meta, TensorMeta) and meta.dtype != dtype:
            message = f"{subject} gives {dtype}, and the graph says {meta.dtype}"
            raise here.at("meta").invalid(message, "result-type/dtype")


def _check_arguments(node: Node, signature: Signature, values: Values, here: Place) -> None:
    subject, positional = f"operator `{node.op}`", signature.positional
    message = f"{subject} takes {len(positional)} positional arguments, got {len(node.args)}"
    here.at("args").require(len(node.args) <= len(positional), message, "operator-arguments/positional")
    rest = {each.name: each for each in (*positional[len(node.args) :], *signature.keyword_only)}
    unknown = next((keyword for keyword in node.kwargs if keyword not in rest), None)
    if unknown is not None:
        message = f"{subject} takes no keyword argument {unknown[:40]!r} here"
        raise here.at("kwargs", unknown).invalid(message, "operator-arguments/keyword")
    given = [("args", index, *pair) for index, pair in enumerate(zip(positional, node.args, strict=False))]
    given += [("kwargs", keyword, rest[keyword], argument) for keyword, argument in node.kwargs.items()]
    for kind, step, parameter, argument in given:
        is_undefined = parameter.name in _UNDEFINED.get(node.op, ()) and kind_of(argument, values) == "nothing"
        if not is_undefined and not takes(parameter.type, argument, values):
            message = f"argument `{parameter.name}` of {subject} is no {parameter.type.removesuffix('?')}"
            raise here.at(kind, step).invalid(message, "argument-type/argument")
    lacking = next((each.name for each in rest.values() if each.default is None and each.name not in node.kwargs), None)
    here.require(lacking is None, f"{subject} lacks its argument `{lacking}`", "operator-arguments/missing")


def takes(type_: str, argument: Argument, values: Values) -> bool:
    """Return whether an argument may be passed for a type."""
    if type_.endswith("?"):
        return argument is None or takes(type_[:-1], argument, values)
    if type_.endswith("]"):
        inner, _, count = type_[:-1].rpartition("[")
        if isinstance(argument, list):
            return all(takes(inner, item, values) for item in argument)
        # A list of fixed length takes one item for all.
        return kind_of(argument, values) == "sequence" or (count != "" and takes(inner, argument, values))
    return type_ not in _TAKEN or kind_of(argument, values) in _TAKEN[type_]


def _is_result(types: Sequence[str], meta: ValueMeta) -> bool:
    if len(types) == 1:
        return _is_one(types[0], meta)
    if not types:
        return isinstance(meta, NothingMeta)
    return isinstance(meta, SequenceMeta) and len(meta.items) == len(types) and all(map(_is_one, types, meta.items))


def _is_one(type_: str, meta: ValueMeta) -> bool:
    type_, kind = type_.removesuffix("?"), kind_of(meta)
    if kind == "nothing":
        return True
    if type_.endswith("]"):
        inner = type_.rpartition("[")[0]
        return isinstance(meta, SequenceMeta) and all(_is_one(inner, item) for item in meta.items)
    return kind in _GIVEN[type_] if type_ in _GIVEN else kind not in ("tensor", "sequence")


def _is_item(node: Node, values: Values) -> bool:
    """Return whether the number that an operator reads from a tensor is said to be of the tensor's kind."""
    if node.op not in ("aten::item.default", "aten::_local_scalar_dense.default") or not node.args:
        return True
    source = values.get(node.args[0]) if isinstance(node.args[0], str) else None
    if not isinstance(source, TensorMeta) or isinstance(node.meta, NothingMeta):
        return True
    return (category_of(source.dtype) == "float") == (kind_of(node.meta) == "float")


_CATEGORIES = ("bool", "int", "float", "complex")
_OPERANDS = ("self", "other", "min", "max", "exponent")
"""Parameters whose numbers promote; `alpha`, `value` and the like are converted."""


class Rule(NamedTuple):
    """How dtypes of results follow: a word of `allowed/dtypes.txt`, or empty; a parameter that is it where given."""

    kind: str
    signature: Signature
    gives: Parameter | None


def kinds() -> dict[str, str]:
    """Return the word of `allowed/dtypes.txt` for each base name there."""
    return kinds_in("allowed/dtypes.txt")


@lru_cache(maxsize=4096)
def rule_of(op: str, schema: str) -> Rule | None:
    """Return the rule of an `aten` operator; None: there is none."""
    base = op.removeprefix("aten::").partition(".")[0]
    signature = signature_of(schema)
    # Some write to an argument that is given by keyword alone (`out`).
    writes = "!" in schema.partition("*, ")[2].partition(") -> ")[0]
    if signature is None or not op.startswith("aten::") or writes or not signature.returns:
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


def result_dtypes(node: Node, schema: str | None, values: Values) -> str | tuple[str, ...] | None:
    """Return the dtype of the results of a call that fits its signature, or one per result; None: no rule says it."""
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
    for argument in arguments:
        for each in elements(argument):
            meta = values[each] if isinstance(each, str) else None
            if isinstance(meta, TensorMeta):
                yield meta.dtype
