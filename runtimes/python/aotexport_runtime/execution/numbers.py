"""Numbers and lists that cross a border of a graph: they are what its metadata says, and have at most 64 bits.

`validate/builtins.py` bounds the arithmetic of a graph on this ground. A number comes into a graph as its input, as a
result of an operator that reads data, or from a subgraph.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from aotexport_runtime.errors import BundleInvalid, CheckFailed
from aotexport_runtime.schema.values import NothingMeta, ScalarMeta, SequenceMeta, SizeMeta, TensorMeta, ValueMeta

_MOST = 1 << 64
_SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)


def has_numbers(meta: ValueMeta) -> bool:
    """Return whether a value is, or may hold, what is no tensor."""
    if isinstance(meta, SequenceMeta):
        return any(map(has_numbers, meta.items))
    return isinstance(meta, SizeMeta | ScalarMeta)


def checked(value: Any, meta: ValueMeta) -> Any:
    """Return a value that is what its metadata says.

    Raises:
        CheckFailed: it is a number of another type, or of more than 64 bits.
    """
    if isinstance(meta, SizeMeta) or (isinstance(meta, ScalarMeta) and meta.type != "float"):
        if isinstance(value, int) and -_MOST < value < _MOST:
            return value
    elif isinstance(meta, ScalarMeta):
        if type(value) is float:
            return value
    elif isinstance(meta, SequenceMeta) and isinstance(value, tuple | list):
        for item, item_meta in zip(value, meta.items, strict=False):
            if has_numbers(item_meta):
                checked(item, item_meta)
        return value
    if isinstance(value, _SYMBOLIC):
        return value
    raise CheckFailed(f"a graph expects {_words(meta)}, and got {_found(value)}")


def _words(meta: ValueMeta) -> str:
    if isinstance(meta, SequenceMeta):
        return "a list"
    return "a float" if isinstance(meta, ScalarMeta) and meta.type == "float" else "an integer of at most 64 bits"


def _found(value: Any) -> str:
    return f"one of {value.bit_length()} bits" if isinstance(value, int) else f"a {type(value).__name__}"


def check_declared(op: str, returns: Sequence[Any], meta: ValueMeta) -> None:
    """Refuse metadata of another kind than the results that an operator has.

    Args:
        op: full operator name, for errors.
        returns: returns of the operator's schema.
        meta: metadata of the result.

    Raises:
        BundleInvalid: names the operator.
    """
    kinds = [str(result.real_type) for result in returns]
    if len(kinds) == 1:
        fits = _fits(kinds[0], meta)
    elif not kinds:
        fits = isinstance(meta, NothingMeta)
    else:
        fits = isinstance(meta, SequenceMeta) and len(meta.items) == len(kinds) and all(map(_fits, kinds, meta.items))
    if not fits:
        raise BundleInvalid(
            f"operator `{op}` gives {', '.join(kinds) or 'nothing'}, and the graph says otherwise",
            check="result-type/signature",
        )


def _fits(kind: str, meta: ValueMeta) -> bool:
    if isinstance(meta, NothingMeta):
        return True
    if kind in ("Tensor", "Optional[Tensor]"):
        return isinstance(meta, TensorMeta)
    if kind.startswith("List["):
        return isinstance(meta, SequenceMeta)
    is_float = isinstance(meta, ScalarMeta) and meta.type == "float"
    if kind in ("int", "bool"):
        return isinstance(meta, SizeMeta | ScalarMeta) and not is_float
    return is_float if kind == "float" else not isinstance(meta, TensorMeta | SequenceMeta)
