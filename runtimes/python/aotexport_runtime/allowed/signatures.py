"""Signatures of operators as graphs record them: `aten::add.Tensor(Tensor self, Tensor other, *, ...) -> Tensor`."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import NamedTuple


class Parameter(NamedTuple):
    """An argument of an operator.

    Attributes:
        type: `Tensor`, `int[2]`, `ScalarType?`, without alias annotations.
        alias: its annotation: `a` where a result may be a view of it, `a!` where the operator writes to it.
        default: as text; None: it is required.
    """

    name: str
    type: str
    alias: str
    default: str | None


class Signature(NamedTuple):
    """A signature: arguments that may be passed by position, others, type per result, the text behind the arrow."""

    positional: tuple[Parameter, ...]
    keyword_only: tuple[Parameter, ...]
    returns: tuple[str, ...]
    results: str


@lru_cache(maxsize=4096)
def signature_of(schema: str) -> Signature | None:
    """Return the signature in `ns::op.overload(arguments) -> results`; None: it is malformed."""
    rest = schema.partition("(")[2]
    try:
        arguments, end = _split(rest)
        arrow, _, results = rest[end:].strip().partition(" ")
        listed = _split(results[1:])[0] if results.startswith("(") else [results]
        cut = arguments.index("*") if "*" in arguments else len(arguments)
        positional, keyword_only = [
            tuple([_parameter(each) for each in part if each]) for part in (arguments[:cut], arguments[cut + 1 :])
        ]
    except ValueError:
        return None
    returns = tuple([_ALIAS.sub("", each).split(" ")[0] for each in listed if results != "()"])
    return Signature(positional, keyword_only, returns, results) if arrow == "->" and all(returns) else None


def is_compatible(captured: str, current: str) -> bool:
    """Return whether a call made for signature `captured` means the same under `current`.

    True when `current` only adds arguments with defaults, after the positional ones or among the keywords, and
    nothing else differs but what `RENAMED` lists, and `SymInt` in the place of `int`: calls are made with numbers.
    """
    old, new = signature_of(_uniform(captured)), signature_of(_uniform(current))
    if old is None or new is None or old.results != new.results:
        return False
    count = len(old.positional)
    by_keyword = {*new.positional[count:], *new.keyword_only}
    added = by_keyword - {*old.keyword_only}
    is_same = new.positional[:count] == old.positional and by_keyword.issuperset(old.keyword_only)
    return is_same and all(each.default is not None for each in added)


_DISTANCES = ("Tensor grad_output,", "Tensor grad,")

RENAMED = {"aten::_cdist_backward": _DISTANCES, "aten::_pdist_backward": _DISTANCES}
"""Positional arguments that a release of torch names otherwise: its text (from 2.15), and that of the operator set."""


def _uniform(schema: str) -> str:
    """Return a signature with numbers in place of symbolic ones, and with the names of the operator set."""
    schema = _SYMBOLIC.sub(lambda found: found[0].removeprefix("Sym").lower(), schema)
    renamed = RENAMED.get(schema.partition("(")[0].partition(".")[0])
    return schema.replace(*renamed) if renamed else schema


def _split(text: str) -> tuple[list[str], int]:
    """Return what commas separate up to the bracket that closes `text`, and the index behind it; none: `ValueError`."""
    depth, begin, items, is_quoted = 1, 0, list[str](), False
    for index, character in enumerate(text):
        is_quoted ^= character == '"'
        if is_quoted:
            continue
        depth += (character in "([") - (character in ")]")
        if depth == 0 or (character == "," and depth == 1):
            items.append(text[begin:index].strip())
            begin = index + 1
        if depth == 0:
            return items, begin
    raise ValueError(text)


def _parameter(text: str) -> Parameter:
    declared, equals, default = text.partition("=")
    type_, _, name = declared.strip().rpartition(" ")
    if not type_ or not name.isidentifier():
        raise ValueError(text)
    alias = _ALIAS.search(type_)
    return Parameter(name, _ALIAS.sub("", type_), alias[1] if alias else "", default if equals else None)


_SYMBOLIC = re.compile(r"\bSym(?:Int|Bool)\b")

_ALIAS = re.compile(r"(?<=\w)\((\w+!?|\w*!? ?-> ?[\w*|]+|[\w|]+!?)\)(?=[\[?! ,)]|$)")
"""`(a)`, `(a!)`, `(a -> *)`, `(a|b)` behind a type."""
