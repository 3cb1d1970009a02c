"""Checks on the values of a call: those of the model, and of numbers that come into a graph.

`validate/builtins.py` bounds arithmetic on the ground that numbers are what metadata says, and have at most 64 bits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from aotexport_runtime.allowed.operators import INFIX
from aotexport_runtime.errors import BundleInvalid, CheckFailed
from aotexport_runtime.rewrite.names import CHECK
from aotexport_runtime.schema.graph import Graph, Node
from aotexport_runtime.schema.values import ScalarMeta, SequenceMeta, SizeMeta, ValueMeta


def check(condition: Any, message: str, where: str, *values: Any) -> None:
    """Raise `CheckFailed` unless `condition`, computed from `values`, holds; `where`: the user's line."""
    if not condition:
        shown = ", ".join(repr(value) for value in values)
        raise CheckFailed(f"{f'{where}: ' if where else ''}{message}. The call has {shown}")


def place(graph: Graph, node: Node) -> str:
    """Return the user's line of `node`; empty: unknown."""
    if node.source is None:
        return ""
    line = graph.sources[node.source]
    return f"{line.file}:{line.line} in {line.function}"


def shown_values(nodes: Sequence[Node]) -> dict[str, list[str]]:
    """Return, per node that `check` can run, the names of the values that its condition compares."""
    by_name = {node.name: node for node in nodes}
    checks = (node for node in nodes if node.op == CHECK and len(node.args) == 2 and not node.kwargs)
    return {node.name: _compared(node.args[0], by_name) for node in checks if isinstance(node.args[0], str)}


def _compared(name: str, by_name: Mapping[str, Node]) -> list[str]:
    node = by_name.get(name)
    if node is None or (node.op not in INFIX and node.op != "python::not"):
        return [name]
    operands = [argument for argument in node.args if isinstance(argument, str)]
    if node.op == "python::not" and len(operands) == 1:
        return _compared(operands[0], by_name)
    return operands or [name]


# --- numbers, lists and shapes ------------------------------------------------------------------------------

_MOST = 1 << 64
_SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)


def has_numbers(meta: ValueMeta) -> bool:
    """Return whether a value is, or may hold, what is no tensor."""
    if isinstance(meta, SequenceMeta):
        return any(map(has_numbers, meta.items))
    return isinstance(meta, SizeMeta | ScalarMeta)


def checked(value: Any, meta: ValueMeta) -> Any:
    """Return a value that is what its metadata says; others, and over 64 bits, are refused (`CheckFailed`)."""
    if isinstance(meta, SequenceMeta):
        expected, fits = "a list", isinstance(value, tuple | list)
        for item, item_meta in zip(value, meta.items, strict=False) if fits else ():
            if has_numbers(item_meta):
                checked(item, item_meta)
    elif isinstance(meta, ScalarMeta) and meta.type == "float":
        expected, fits = "a float", type(value) is float
    else:
        expected, fits = "an integer of at most 64 bits", isinstance(value, int) and -_MOST < value < _MOST
    if not fits and not isinstance(value, _SYMBOLIC):
        found = f"one of {value.bit_length()} bits" if isinstance(value, int) else f"a {type(value).__name__}"
        raise CheckFailed(f"a graph expects {expected}, and got {found}")
    return value


def check_shape(tensor: torch.Tensor, sizes: Sequence[int]) -> None:
    """Refuse a tensor of other sizes than these (`BundleInvalid`); -1: any."""
    shape = tensor.shape
    if len(shape) != len(sizes) or any(size not in (-1, found) for size, found in zip(sizes, shape, strict=True)):
        raise BundleInvalid(
            f"a value of a graph has the shape {list(shape)}, and its metadata say {list(sizes)}",
            check="result-type/shape",
        )
