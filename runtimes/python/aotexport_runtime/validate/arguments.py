"""Rules of arguments and of the metadata of values."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from aotexport_runtime.errors import Place
from aotexport_runtime.schema.bounded import INT64_MAX, MAX_AXES
from aotexport_runtime.schema.graph import Node
from aotexport_runtime.schema.values import (
    Argument,
    SequenceMeta,
    SizeArgument,
    SizeMeta,
    SliceArgument,
    SubgraphArgument,
    TensorMeta,
    ValueMeta,
)
from aotexport_runtime.values.sizes import check_size, symbols_of

_MAX_INTEGER = 1 << 64


def references(argument: Argument) -> Iterator[str]:
    """Yield the names of the values that `argument` refers to."""
    if isinstance(argument, str):
        yield argument
    elif isinstance(argument, list):
        for item in argument:
            yield from references(item)
    elif isinstance(argument, SliceArgument):
        for item in (argument.start, argument.stop, argument.step):
            yield from references(item)


def descendants(nodes: Sequence[Node], roots: set[str]) -> set[str]:
    """Return `roots` and every value computed from them."""
    derived = set(roots)
    for node in nodes:
        if any(name in derived for argument in (*node.args, *node.kwargs.values()) for name in references(argument)):
            derived.add(node.name)
    return derived


def check_argument(
    argument: Argument, defined: Collection[str], subgraphs: Collection[str], symbols: set[str], where: Place
) -> None:
    """Refuse an argument with a dangling reference, or a value that no operator of a bundle takes.

    Args:
        argument: argument of an operator, or a returned value.
        defined: names of the values that it may refer to.
        subgraphs: names of the subgraphs that it may refer to.
        symbols: symbols of the program.
        where: for errors.
    """
    if isinstance(argument, str):
        if argument not in defined:
            raise where.invalid(f"value {argument[:80]!r} is used before it is defined", "value-undefined/reference")
    elif isinstance(argument, list):
        for item in argument:
            check_argument(item, defined, subgraphs, symbols, where)
    elif isinstance(argument, int):
        if not -_MAX_INTEGER < argument < _MAX_INTEGER:
            raise where.invalid("an integer argument has more than 64 bits", "number-limit/argument")
    elif isinstance(argument, SliceArgument):
        for item in (argument.start, argument.stop, argument.step):
            check_argument(item, defined, subgraphs, symbols, where)
    elif isinstance(argument, SizeArgument):
        check_size(argument.value, symbols, where=where)
    elif isinstance(argument, SubgraphArgument) and argument.name not in subgraphs:
        raise where.invalid(f"no subgraph {argument.name[:80]!r}", "reference-missing/subgraph")


def check_constant(argument: Argument, subject: str, where: Place) -> None:
    """Refuse an argument that is no constant: it refers to a value, a symbol or a subgraph."""
    if isinstance(argument, list):
        for item in argument:
            check_constant(item, subject, where)
    elif isinstance(argument, SliceArgument):
        for part in (argument.start, argument.stop, argument.step):
            check_constant(part, subject, where)
    elif isinstance(argument, str | SizeArgument | SubgraphArgument):
        raise where.invalid(f"{subject} is no constant", "constant-expected/constant")
    else:
        check_argument(argument, (), (), set(), where)


def check_meta(meta: ValueMeta, symbols: set[str], where: Place) -> None:
    """Refuse metadata with malformed sizes or unknown symbols."""
    if isinstance(meta, TensorMeta):
        if len(meta.shape) != len(meta.stride) or len(meta.shape) > MAX_AXES:
            raise where.invalid(
                f"a tensor has {len(meta.shape)} sizes and {len(meta.stride)} strides; at most {MAX_AXES} are read",
                "tensor-layout/ranks",
            )
        for size in (*meta.shape, *meta.stride, meta.offset):
            if not isinstance(size, int) or size > INT64_MAX:
                check_size(size, symbols, where=where)
            elif size < 0:
                raise where.invalid("a size, stride or offset is negative", "tensor-layout/negative")
    elif isinstance(meta, SizeMeta):
        if meta.value is not None:
            check_size(meta.value, symbols, where=where)
    elif isinstance(meta, SequenceMeta):
        for item in meta.items:
            check_meta(item, symbols, where)


def introduced(meta: ValueMeta) -> set[str]:
    """Return the symbols in the sizes of `meta`, which introduces symbols for sizes that depend on data."""
    if isinstance(meta, TensorMeta):
        return {symbol for size in meta.shape for symbol in symbols_of(size)}
    if isinstance(meta, SizeMeta):
        return set() if meta.value is None else symbols_of(meta.value)
    if isinstance(meta, SequenceMeta):
        return {symbol for item in meta.items for symbol in introduced(item)}
    return set()
