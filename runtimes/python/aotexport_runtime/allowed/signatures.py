"""Signatures of operators as graphs record them: `aten::add.Tensor(Tensor self, Tensor other, *, ...) -> Tensor`."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import NamedTuple


class Schema(NamedTuple):
    """The parts of a signature, as text.

    Attributes:
        positional: arguments that may be passed by position, with types and defaults.
        keyword_only: those that may not.
        returns: what is behind the arrow.
    """

    positional: list[str]
    keyword_only: list[str]
    returns: str


class Parameter(NamedTuple):
    """An argument of an operator.

    Attributes:
        name: its keyword.
        type: `Tensor`, `int[2]`, `ScalarType?`, without alias annotations.
        is_required: whether it has no default.
    """

    name: str
    type: str
    is_required: bool


class Signature(NamedTuple):
    """A signature.

    Attributes:
        positional: arguments that may be passed by position.
        keyword_only: those that may not.
        returns: type per result.
    """

    positional: tuple[Parameter, ...]
    keyword_only: tuple[Parameter, ...]
    returns: tuple[str, ...]


def split_schema(schema: str) -> Schema | None:
    """Return the parts of `ns::op.overload(arguments) -> returns`; None: it is no schema."""
    _, _, rest = schema.partition("(")
    found = _split(rest)
    if found is None:
        return None
    arguments, end = found
    cut = arguments.index("*") if "*" in arguments else len(arguments)
    positional = [argument for argument in arguments[:cut] if argument]
    return Schema(positional, arguments[cut + 1 :], rest[end:].strip())


@lru_cache(maxsize=4096)
def signature_of(schema: str) -> Signature | None:
    """Return the signature in `schema`; None: it is malformed."""
    parts = split_schema(_ALIAS.sub("", schema))
    if parts is None or not parts.returns.startswith("->"):
        return None
    returns = parts.returns.removeprefix("->").strip()
    several = _split(returns[1:]) if returns.startswith("(") else None
    results = [returns] if several is None else [result for result in several[0] if result]
    positional, keyword_only = [tuple(map(_parameter, each)) for each in (parts.positional, parts.keyword_only)]
    if None in (*positional, *keyword_only) or not all(results):
        return None
    return Signature(
        tuple(each for each in positional if each is not None),
        tuple(each for each in keyword_only if each is not None),
        tuple(result.split(" ")[0] for result in results),
    )


def _split(text: str) -> tuple[list[str], int] | None:
    """Return what commas separate up to the bracket that closes `text`, and the index behind it."""
    depth, current, items, is_quoted = 1, "", list[str](), False
    for index, character in enumerate(text):
        is_quoted ^= character == '"'
        if is_quoted:
            current += character
            continue
        depth += (character in "([") - (character in ")]")
        if depth == 0 or (character == "," and depth == 1):
            items.append(current.strip())
            current = ""
        else:
            current += character
        if depth == 0:
            return items, index + 1
    return None


def _parameter(text: str) -> Parameter | None:
    declared, equals, _ = text.partition("=")
    type_, space, name = declared.strip().rpartition(" ")
    return Parameter(name, type_, not equals) if space and name.isidentifier() else None


_ALIAS = re.compile(r"(?<=\w)\((\w+!?|\w*!? ?-> ?[\w*|]+|[\w|]+!?)\)(?=[\[?! ,)]|$)")
"""`(a)`, `(a!)`, `(a -> *)`, `(a|b)` behind a type."""
