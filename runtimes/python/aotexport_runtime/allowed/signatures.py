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


def is_compatible(captured: str, current: str) -> bool:
    """Return whether a call made for signature `captured` means the same under `current`.

    True when `current` only adds arguments with defaults, after the positional ones or among the keywords, and
    nothing else differs but what `RENAMED` lists, and `SymInt` in the place of `int`: calls are made with numbers.
    """
    old, new = split_schema(_uniform(captured)), split_schema(_uniform(current))
    if old is None or new is None or old.returns != new.returns:
        return False
    count = len(old.positional)
    if new.positional[:count] != old.positional:
        return False
    by_keyword = [*new.positional[count:], *new.keyword_only]
    added = [argument for argument in by_keyword if argument not in old.keyword_only]
    return set(old.keyword_only) <= set(by_keyword) and all("=" in argument for argument in added)


_DISTANCES = ("Tensor grad_output,", "Tensor grad,")

RENAMED = {"aten::_cdist_backward": _DISTANCES, "aten::_pdist_backward": _DISTANCES}
"""Positional arguments that a release of torch names otherwise: its text (from 2.15), and that of the operator set."""


def _uniform(schema: str) -> str:
    """Return a signature with numbers in place of symbolic ones, and with the names of the operator set."""
    schema = _SYMBOLIC.sub(lambda found: found[0].removeprefix("Sym").lower(), schema)
    renamed = RENAMED.get(schema.partition("(")[0].partition(".")[0])
    return schema.replace(*renamed) if renamed else schema


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


_SYMBOLIC = re.compile(r"\bSym(?:Int|Bool)\b")

_ALIAS = re.compile(r"(?<=\w)\((\w+!?|\w*!? ?-> ?[\w*|]+|[\w|]+!?)\)(?=[\[?! ,)]|$)")
"""`(a)`, `(a!)`, `(a -> *)`, `(a|b)` behind a type."""
