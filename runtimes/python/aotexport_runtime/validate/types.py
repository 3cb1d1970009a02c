"""Types of values and arguments: what the signatures of a graph's operators say, against what the graph declares.

Signatures are those that the graph records; the loader compares them with the running torch's. Dtypes are inferred
where `validate/dtypes.py` has a rule. Sizes are not: what an engine takes from them, it compares at the call.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence

import msgspec

from aotexport_runtime.allowed.operators import NAMESPACES, aten_signatures
from aotexport_runtime.allowed.signatures import Parameter, Signature, is_compatible, signature_of
from aotexport_runtime.errors import BundleInvalid, Place
from aotexport_runtime.schema.graph import Node
from aotexport_runtime.schema.values import (
    Argument,
    ComplexArgument,
    DeviceArgument,
    DTypeArgument,
    FloatArgument,
    LayoutArgument,
    MemoryFormatArgument,
    NothingMeta,
    ScalarMeta,
    SequenceMeta,
    SizeArgument,
    SizeMeta,
    StringArgument,
    TensorMeta,
    ValueMeta,
)
from aotexport_runtime.validate.dtypes import wrong_dtype

Values = Mapping[str, ValueMeta]

_NUMBERS = (bool, int, float, FloatArgument, SizeArgument)
_TAKEN: dict[str, tuple[type, ...]] = {
    # torch makes a tensor of a number.
    "Tensor": (*_NUMBERS, ComplexArgument),
    "Scalar": (*_NUMBERS, ComplexArgument),
    "complex": (*_NUMBERS, ComplexArgument),
    "float": _NUMBERS,
    "int": (bool, int, SizeArgument),
    "SymInt": (bool, int, SizeArgument),
    "bool": (bool, int, SizeArgument),
    "SymBool": (bool, int, SizeArgument),
    "str": (StringArgument,),
    "ScalarType": (DTypeArgument,),
    "Layout": (LayoutArgument,),
    "MemoryFormat": (MemoryFormatArgument,),
    "Device": (DeviceArgument,),
    "Generator": (),
}
"""Constants that an argument of a type may be; other types are of custom operators, and for them to say."""

_WHOLE = ("int", "SymInt", "bool", "SymBool")

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

    Args:
        node: any call; builtins pass.
        schema: the signature that the graph records; None: none.
        values: metadata of the values before the node.
        here: place of the node.
        infers_dtypes: whether dtypes of results follow from those of arguments: no autocast changes them.
    """
    if node.op.partition("::")[0] in NAMESPACES:
        return
    signature = None if schema is None else signature_of(schema)
    if signature is None or schema is None or schema.partition("(")[0] != _written(node.op):
        raise here.at("op").invalid(f"no signature of operator `{node.op[:80]}`", "operator-schema/signature")
    in_set = aten_signatures().get(node.op.removeprefix("aten::"))
    if in_set not in (None, schema) and not is_compatible(schema, in_set) and not is_compatible(in_set, schema):
        raise here.at("op").invalid(
            f"operator `{node.op}` has another signature in its operator set: {in_set}", "operator-schema/operator-set"
        )
    _check_arguments(node, signature, values, here)
    if not _returns(signature.returns, node, values):
        given = ", ".join(signature.returns) or "nothing"
        raise here.at("meta").invalid(
            f"operator `{node.op}` gives {given}, and the graph says otherwise", "result-type/signature"
        )
    if infers_dtypes and (lie := wrong_dtype(node, schema, values)) is not None:
        raise here.at("meta").invalid(f"operator `{node.op}` gives {lie}", "result-type/dtype")


def _written(op: str) -> str:
    return op.removesuffix(".default")


def _check_arguments(node: Node, signature: Signature, values: Values, here: Place) -> None:
    positional = signature.positional
    if len(node.args) > len(positional):
        raise here.at("args").invalid(
            f"operator `{node.op}` takes {len(positional)} positional arguments, got {len(node.args)}",
            "operator-arguments/positional",
        )
    for index, (parameter, argument) in enumerate(zip(positional, node.args, strict=False)):
        if not takes(parameter.type, argument, values) and not _is_undefined(node, parameter, argument, values):
            raise _wrong_type(node, parameter, here.at("args", index))
    rest = {each.name: each for each in (*positional[len(node.args) :], *signature.keyword_only)}
    for keyword, argument in node.kwargs.items():
        if keyword not in rest:
            raise here.at("kwargs", keyword).invalid(
                f"operator `{node.op}` takes no keyword argument {keyword[:40]!r} here", "operator-arguments/keyword"
            )
        if not takes(rest[keyword].type, argument, values):
            raise _wrong_type(node, rest[keyword], here.at("kwargs", keyword))
    lacking = next((each.name for each in rest.values() if each.is_required and each.name not in node.kwargs), None)
    if lacking is not None:
        raise here.invalid(f"operator `{node.op}` lacks its argument `{lacking}`", "operator-arguments/missing")


def _is_undefined(node: Node, parameter: Parameter, argument: Argument, values: Values) -> bool:
    """Return whether an argument is nothing where an operator takes nothing for a tensor."""
    is_nothing = argument is None or (isinstance(argument, str) and isinstance(values[argument], NothingMeta))
    return is_nothing and parameter.name in _UNDEFINED.get(node.op, ())


def _wrong_type(node: Node, parameter: Parameter, here: Place) -> BundleInvalid:
    return here.invalid(
        f"argument `{parameter.name}` of operator `{node.op}` is no {parameter.type.removesuffix('?')}",
        "argument-type/argument",
    )


def takes(type_: str, argument: Argument, values: Values) -> bool:
    """Return whether an argument may be passed for a type."""
    if type_.endswith("?"):
        return argument is None or takes(type_[:-1], argument, values)
    if type_.endswith("]"):
        inner, _, count = type_[:-1].rpartition("[")
        if isinstance(argument, list):
            return all(takes(inner, item, values) for item in argument)
        if isinstance(argument, str) and isinstance(values[argument], SequenceMeta):
            return True
        # A list of fixed length takes one item for all.
        return count != "" and takes(inner, argument, values)
    if isinstance(argument, str):
        return _is_of(type_, values[argument])
    return isinstance(argument, _TAKEN[type_]) if type_ in _TAKEN else True


def _is_of(type_: str, meta: ValueMeta) -> bool:
    """Return whether a computed value may be passed for a type."""
    if isinstance(meta, TensorMeta):
        return type_ == "Tensor" or type_ not in _TAKEN
    if isinstance(meta, SizeMeta | ScalarMeta):
        is_float = isinstance(meta, ScalarMeta) and meta.type == "float"
        return type_ not in _TAKEN or (bool in _TAKEN[type_] and not (is_float and type_ in _WHOLE))
    return type_ not in _TAKEN


def _returns(types: Sequence[str], node: Node, values: Values) -> bool:
    """Return whether the metadata of a node may be of the results of its operator."""
    if len(types) == 1:
        return _is_result(types[0], node.meta) and _is_item(node, values)
    if not types:
        return isinstance(node.meta, NothingMeta)
    items = node.meta.items if isinstance(node.meta, SequenceMeta) else ()
    return len(items) == len(types) and all(map(_is_result, types, items))


def _is_result(type_: str, meta: ValueMeta) -> bool:
    if type_.endswith("?"):
        return _is_result(type_[:-1], meta)
    if isinstance(meta, NothingMeta):
        return True
    if type_.endswith("]"):
        inner = type_.rpartition("[")[0]
        return isinstance(meta, SequenceMeta) and all(_is_result(inner, item) for item in meta.items)
    if type_ == "Tensor":
        return isinstance(meta, TensorMeta)
    is_float = isinstance(meta, ScalarMeta) and meta.type == "float"
    if type_ in _WHOLE:
        return isinstance(meta, SizeMeta | ScalarMeta) and not is_float
    return is_float if type_ == "float" else not isinstance(meta, TensorMeta | SequenceMeta)


def _is_item(node: Node, values: Values) -> bool:
    """Return whether the number that an operator reads from a tensor is said to be of the tensor's kind."""
    if node.op not in ("aten::item.default", "aten::_local_scalar_dense.default") or not node.args:
        return True
    source = values.get(node.args[0]) if isinstance(node.args[0], str) else None
    if not isinstance(source, TensorMeta) or isinstance(node.meta, NothingMeta):
        return True
    return source.dtype.startswith(("float", "bfloat")) == (
        isinstance(node.meta, ScalarMeta) and node.meta.type == "float"
    )
