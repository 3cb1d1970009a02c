"""Values in records: arguments and metadata, what they refer to and of what kind they are; indices, names, spans."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import cache
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from aotexport_runtime.errors import Place
from aotexport_runtime.schema import values as records
from aotexport_runtime.schema.bounded import INT64_MAX, MAX_AXES, bounds_of
from aotexport_runtime.schema.graph import Graph, Node
from aotexport_runtime.schema.manifest import StoredPart
from aotexport_runtime.schema.values import Argument, Element, SliceArgument, ValueMeta
from aotexport_runtime.values.sizes import check_size, symbols_of

if TYPE_CHECKING:
    from aotexport_runtime.schema.vectors import VectorPart

Values = Mapping[str, ValueMeta]
"""Metadata of the values of a graph, by name."""

NUMBERS = ("bool", "int", "float")

_MAX_INTEGER = 1 << 64
_KINDS = {"size": "int", "NoneType": "nothing"}
_WORDS = {"bool": "an integer", "int": "an integer", "float": "a float", "sequence": "a sequence", "nothing": "nothing"}


def kind_of(value: Argument | ValueMeta, values: Values = MappingProxyType({})) -> str:
    """Return the kind of an argument or a value: its tag, or its type in Python; `int` of sizes, `nothing` of None."""
    if isinstance(value, str):
        value = values[value]
    return value.type if isinstance(value, records.ScalarMeta) else _kind_of_type(type(value))


@cache
def _kind_of_type(type_: Any) -> str:
    kind = type_.__struct_config__.tag if hasattr(type_, "__struct_config__") else type_.__name__
    return str(_KINDS.get(kind, kind))


def described(meta: ValueMeta | None, more_axes: int = 0, *, typed: bool = True) -> str:
    """Return what a value is said to be, in words: of a tensor its axes and `more_axes`, and if `typed` its dtype."""
    if isinstance(meta, records.TensorMeta):
        return f"a tensor{f' of {meta.dtype}' if typed else ''} with {len(meta.shape) + more_axes} axes"
    return _WORDS[kind_of(meta)]


def described_argument(argument: Argument, values: Values, more_axes: int = 0, *, typed: bool = True) -> str | None:
    """Return what an argument or output is, as `described` does; None: the graph has no value of its name."""
    if isinstance(argument, str):
        return described(values[argument], more_axes, typed=typed) if argument in values else None
    return _WORDS.get(kind_of(argument), "a constant")


def graphs_of(graph: Graph) -> Iterator[Graph]:
    """Yield a graph, and the subgraphs in it at any depth."""
    yield graph
    for subgraph in graph.subgraphs.values():
        yield from graphs_of(subgraph)


def metas_of(graph: Graph) -> dict[str, ValueMeta]:
    """Return the metadata of every value of a graph, by name."""
    return {value.name: value.meta for value in (*graph.inputs, *graph.nodes)}


def elements(argument: Argument) -> Sequence[Element]:
    """Return the items of an array, the parts of a slice, else the argument itself."""
    if isinstance(argument, list):
        found: list[Element] = []
        for item in argument:
            if isinstance(item, list | SliceArgument):
                found += elements(item)
            else:
                found.append(item)  # pyrefly: ignore[bad-argument-type]
        return found
    return (argument.start, argument.stop, argument.step) if isinstance(argument, SliceArgument) else (argument,)


def references(argument: Argument) -> Sequence[str]:
    """Return the names of the values that `argument` refers to."""
    return [each for each in elements(argument) if isinstance(each, str)]


def descendants(nodes: Sequence[Node], roots: set[str]) -> set[str]:
    """Return `roots` and every value computed from them."""
    derived = set(roots)
    for node in nodes:
        if any(name in derived for argument in (*node.args, *node.kwargs.values()) for name in references(argument)):
            derived.add(node.name)
    return derived


def check_argument(
    argument: Argument,
    defined: Collection[str],
    subgraphs: Collection[str],
    symbols: set[str],
    where: Place,
    steps: tuple[str | int, ...] = (),
) -> None:
    """Refuse an argument, `steps` below a place, with a dangling reference or a number too large."""
    for each in elements(argument):
        if isinstance(each, str):
            message = f"value {each[:80]!r} is used before it is defined"
            where.at(*steps).require(each in defined, message, "value-undefined/reference")
        elif isinstance(each, int):
            if not -_MAX_INTEGER < each < _MAX_INTEGER:
                raise where.at(*steps).invalid("an integer argument has more than 64 bits", "number-limit/argument")
        elif isinstance(each, records.SizeArgument):
            check_size(each.value, symbols, where=where.at(*steps))
        elif isinstance(each, records.SubgraphArgument) and each.name not in subgraphs:
            raise where.at(*steps).invalid(f"no subgraph {each.name[:80]!r}", "reference-missing/subgraph")


def check_constant(argument: Argument, subject: str, where: Place) -> None:
    """Refuse an argument that is no constant: it refers to a value, a symbol or a subgraph."""
    refers = any(isinstance(each, str | records.SizeArgument | records.SubgraphArgument) for each in elements(argument))
    where.require(not refers, f"{subject} is no constant", "constant-expected/constant")
    check_argument(argument, (), (), set(), where)


def check_meta(meta: ValueMeta, symbols: set[str], where: Place) -> None:
    """Refuse metadata with malformed sizes or unknown symbols."""
    if isinstance(meta, records.TensorMeta):
        check_ranks(meta.shape, meta.stride, "a tensor", where)
        for size in (*meta.shape, *meta.stride, meta.offset):
            if not isinstance(size, int) or size > INT64_MAX:
                check_size(size, symbols, where=where)
            elif size < 0:
                raise where.invalid("a size, stride or offset is negative", "tensor-layout/negative")
    elif isinstance(meta, records.SizeMeta) and meta.value is not None:
        check_size(meta.value, symbols, where=where)
    elif isinstance(meta, records.SequenceMeta):
        for item in meta.items:
            check_meta(item, symbols, where)


def introduced(meta: ValueMeta) -> set[str]:
    """Return the symbols in the sizes of `meta`, which introduces symbols for sizes that depend on data."""
    if isinstance(meta, records.TensorMeta):
        return set().union(*map(symbols_of, meta.shape))
    if isinstance(meta, records.SequenceMeta):
        return set().union(*map(introduced, meta.items))
    return symbols_of(meta.value) if isinstance(meta, records.SizeMeta) and meta.value is not None else set()


def check_index(index: int, count: int, subject: str, check: str, where: Place) -> None:
    """Refuse an index outside `range(count)`; `subject` and `check` are for the error."""
    where.require(0 <= index < count, f"{subject} is {index}, out of range({count})", check)


def check_unique(names: Iterable[object], subject: str, check: str, where: Place) -> None:
    """Refuse a name that occurs twice."""
    twice = first_twice(names)
    where.require(twice is None, f"{subject} {str(twice)[:80]!r} occurs twice", check)


def first_twice(names: Iterable[object]) -> str | None:
    """Return the first name that occurs twice; None: there is none."""
    return next((str(name) for name, count in Counter(names).items() if count > 1), None)


def check_form(text: str, type_: Any, subject: str, check: str, where: Place) -> None:
    """Refuse text that is not of a type of `schema/bounded.py`."""
    bounds = bounds_of(type_)
    where.require(bounds.takes(text), f"{subject} {text[:80]!r} is {bounds.fault}", check)


def check_ranks(
    shape: Sequence[object], stride: Sequence[object], subject: str, where: Place, check: str = "tensor-layout/ranks"
) -> None:
    """Refuse another number of strides than of sizes, or more than are read."""
    sizes, strides = len(shape), len(stride)
    message = f"{subject} has {sizes} sizes and {strides} strides; at most {MAX_AXES} are read"
    where.require(sizes == strides <= MAX_AXES, message, check)


def check_span(tensor: StoredPart | VectorPart, subject: str, where: Place) -> None:
    """Refuse sizes, strides and an offset that can address no storage, or one beyond 64 bits."""
    check_ranks(tensor.shape, tensor.stride, subject, where)
    numbers = *tensor.shape, *tensor.stride, tensor.offset
    message = f"{subject} has negative sizes, strides or offset"
    where.require(min(numbers) >= 0, message, "tensor-layout/negative")
    count, end = math.prod(max(size, 1) for size in tensor.shape), span_end(tensor.shape, tensor.stride, tensor.offset)
    message = f"{subject} has sizes, strides or offset beyond 64 bits"
    where.require(max(count, end, *numbers) <= INT64_MAX, message, "tensor-layout/beyond")


def span_end(shape: Sequence[int], stride: Sequence[int], offset: int) -> int:
    """Return the first element of storage after those that sizes, strides and offset address; 0 if there are none."""
    if 0 in shape:
        return 0
    return offset + sum((size - 1) * step for size, step in zip(shape, stride, strict=True)) + 1
