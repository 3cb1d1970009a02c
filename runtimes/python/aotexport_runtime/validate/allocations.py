"""How much memory a graph asks for, as far as the bundle says it: literal sizes, and sizes in metadata."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from functools import cache

from aotexport_runtime.allowed.operators import VIEWS
from aotexport_runtime.errors import Place
from aotexport_runtime.schema.graph import Graph, Node
from aotexport_runtime.schema.limits import Limits
from aotexport_runtime.schema.values import Argument, DTypeArgument, SequenceMeta, TensorMeta, ValueMeta
from aotexport_runtime.validate.arguments import references

_SIZES_AT = {
    **dict.fromkeys(("empty", "empty_permuted", "empty_strided", "eye", "full", "linspace", "logspace"), 0),
    **dict.fromkeys(("ones", "rand", "randn", "randperm", "tril_indices", "triu_indices", "zeros"), 0),
    **dict.fromkeys(("new_empty", "new_empty_strided", "new_full", "new_ones", "new_zeros", "randint"), 1),
    **dict.fromkeys(("repeat", "resize_"), 1),
}
"""Operators that make a tensor of sizes that are arguments, with the position of the first of these."""

_STEPS_AT = {"linspace": 2, "logspace": 2}
_SIZED = frozenset((*_SIZES_AT, "arange"))


def check_allocations(graph: Graph, limits: Limits, where: Place) -> None:
    """Refuse a graph whose values take more memory at once than the limit, or one of whose operators does.

    Sizes of symbols are not known yet, and count as nothing; views take no memory of their own.
    """
    used = [_used(node) for node in graph.nodes]
    last = {name: index for index, names in enumerate(used) for name in names}
    last.update(dict.fromkeys(references(graph.outputs), len(used)))
    held: dict[str, int] = {}
    sizes: dict[int, int] = {}
    live = 0
    for index, node in enumerate(graph.nodes):
        base = _base(node.op)
        if base not in VIEWS:
            if id(node.meta) not in sizes:  # Layers repeat their metadata.
                sizes[id(node.meta)] = declared_nbytes(node.meta)
            held[node.name] = nbytes = sizes[id(node.meta)]
            live += nbytes
        asked = max(live, _asked_nbytes(node)) if base in _SIZED else live
        if asked > limits.allocation_nbytes:
            most = limits.allocation_nbytes
            message = f"`{node.op}` takes the graph's memory to {asked} bytes; at most {most} are given"
            raise where.at("nodes", index).invalid(message, "bundle-limit/memory")
        for name in used[index]:
            if last[name] == index:
                live -= held.pop(name, 0)


def _used(node: Node) -> list[str]:
    """Return the names of the values that a node uses, and its own: a value that nothing uses is freed at once."""
    names = [node.name]
    for argument in (*node.args, *node.kwargs.values()):
        names += (argument,) if isinstance(argument, str) else references(argument)
    return names


def declared_nbytes(meta: ValueMeta) -> int:
    """Return the memory of a value whose sizes are numbers; 0: they are not, or it is no tensor."""
    if isinstance(meta, SequenceMeta):
        return sum(map(declared_nbytes, meta.items))
    if not isinstance(meta, TensorMeta):
        return 0
    last = 0
    for size, step in zip(meta.shape, meta.stride, strict=True):
        if not isinstance(size, int) or not isinstance(step, int) or size <= 0:
            return 0
        last += (size - 1) * abs(step)
    return (last + 1) * _itemsize(meta.dtype)


@cache
def _base(op: str) -> str:
    return op.removeprefix("aten::").partition(".")[0]


@cache
def _itemsize(dtype: str) -> int:
    digits = re.search(r"\d+", dtype)
    return 1 if digits is None else max(int(digits[0]) // 8, 1)


def _asked_nbytes(node: Node) -> int:
    """Return the memory of a tensor that an operator of `_SIZED` makes of literal sizes; 0: they are not literal."""
    base = _base(node.op)
    if base == "arange":
        bounds = [number for number in _literals(node.args[:2]) if number]
        return 4 * int(max(map(abs, bounds), default=0))
    first = _STEPS_AT.get(base, _SIZES_AT[base])
    if base == "randint" and ".low" in node.op:
        first = 2
    sizes = node.args[first] if len(node.args) > first else None
    numbers = list(_literals(sizes if isinstance(sizes, list) else node.args[first : first + 2]))
    if base == "eye" and len(numbers) == 1:
        numbers *= 2
    dtype = node.kwargs.get("dtype")
    return math.prod(map(abs, numbers)) * (_itemsize(dtype.value) if isinstance(dtype, DTypeArgument) else 4)


def _literals(arguments: list[Argument]) -> Iterator[int]:
    return (argument for argument in arguments if isinstance(argument, int) and not isinstance(argument, bool))
