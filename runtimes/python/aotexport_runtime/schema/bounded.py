"""Numbers and text with bounds: the JSON Schemas state them, and `validate/declared.py` checks them."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from keyword import iskeyword
from typing import Annotated, Any, get_args

MAX_NODES = 1_000_000
MAX_AXES = 64
MAX_TEXT = 1000
MAX_TERMS = 500
MAX_QUANTILES = 65
INT64_MAX = (1 << 63) - 1


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """Keywords of JSON Schema, by their names there, None: not stated; and how a reader refuses what is outside.

    Attributes:
        code: of the refusal.
        apart: whether a check of its own has the bounds, with more around the value.
        fault: what is wrong with a text, in words.
        holds: a further condition, which no keyword can say; None: there is none.
    """

    code: str
    minimum: int | None = None
    maximum: int | None = None
    pattern: str | None = None
    maxLength: int | None = None  # noqa: N815 (a keyword of JSON Schema)
    minItems: int | None = None  # noqa: N815
    maxItems: int | None = None  # noqa: N815
    apart: bool = False
    fault: str = ""
    holds: Callable[[Any], bool] | None = None

    @property
    def keywords(self) -> dict[str, int | str]:
        """The keywords that are stated."""
        return {name: value for name, value in vars(self).items() if name not in _OURS and value is not None}

    def takes(self, value: float | str | Sequence[object]) -> bool:
        """Return whether a number, text or array is within all of them."""
        if isinstance(value, int | float):
            return (self.minimum is None or value >= self.minimum) and (self.maximum is None or value <= self.maximum)
        if not isinstance(value, str):
            return len(value) >= (self.minItems or 0) and (self.maxItems is None or len(value) <= self.maxItems)
        if self.maxLength is not None and len(value) > self.maxLength:
            return False
        matches = self.pattern is None or _compiled(self.pattern).fullmatch(value) is not None
        return matches and (self.holds is None or self.holds(value))


_compiled = cache(re.compile)
_OURS = ("code", "apart", "fault", "holds")


def bounds_of(type_: Any) -> Bounds:
    """Return the bounds of one of the types below."""
    return get_args(type_)[1]


def is_identifier(name: str) -> bool:
    """Return whether Python's code can have a name as it is: Python takes names that NFKC makes equal for one."""
    return name.isidentifier() and not iskeyword(name) and unicodedata.is_normalized("NFKC", name)


Count = Annotated[int, Bounds(minimum=0, maximum=INT64_MAX, code="index-range")]
"""An index, or how many there are of something."""

TableIndex = Annotated[int, Bounds(minimum=0, maximum=INT64_MAX, code="index-range", apart=True)]
"""An index into a table of a graph (7.32)."""

Convention = Annotated[int, Bounds(minimum=1, maximum=INT64_MAX, code="convention-unknown", apart=True)]
"""A calling convention."""

Positive = Annotated[int, Bounds(minimum=1, maximum=INT64_MAX, code="index-range")]
"""A number from 1."""

Whole = Annotated[int, Bounds(minimum=-INT64_MAX, maximum=INT64_MAX, code="number-limit")]
"""A number of either sign."""

Offset = Annotated[int, Bounds(minimum=0, maximum=INT64_MAX, code="tensor-layout", apart=True)]
"""Where a tensor begins in its storage."""

Axes = Annotated[tuple[Count, ...], Bounds(maxItems=MAX_AXES, code="tensor-layout", apart=True)]
"""A number per axis of a stored tensor."""

Digest = Annotated[
    str, Bounds(pattern="^[0-9a-f]{64}$", maxLength=64, code="text-malformed", fault="not a digest of 64 digits")
]
"""A SHA-256 in lower-case hexadecimal."""

Hexadecimal = Annotated[str, Bounds(pattern="^([0-9a-f]{2})*$", code="structure-malformed", apart=True)]
"""Bytes, two digits each."""

VersionText = Annotated[
    str, Bounds(pattern=r"^(0|[1-9][0-9]{0,3})\.(0|[1-9][0-9]{0,3})$", code="version-malformed", apart=True)
]
"""`MAJOR.MINOR`."""

PlainName = Annotated[
    str,
    Bounds(pattern="^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$", maxLength=64, code="name-malformed", fault="not a plain name"),
]
"""A name that is also part of a path."""

OwnName = Annotated[
    str,
    Bounds(pattern="^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$", maxLength=64, code="program-malformed", apart=True),
]
"""The name by which another record, or a folder, leads to the record that the name is in."""

_PART = "[A-Za-z0-9_]([A-Za-z0-9_.+=@-]{0,126}[A-Za-z0-9_+=@-])?"

FilePath = Annotated[
    str,
    Bounds(pattern=f"^{_PART}(/{_PART})*$", maxLength=MAX_TEXT, code="file-path", fault="not a plain relative path"),
]
"""A path of a file inside the bundle."""

ClassName = Annotated[
    str,
    Bounds(
        pattern=r"^[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)*:"
        r"[A-Za-z_][A-Za-z0-9_]*(\.([A-Za-z_][A-Za-z0-9_]*|<locals>))*$",
        maxLength=MAX_TEXT,
        code="name-malformed",
        fault="not the name of a class",
    ),
]
"""A class, `module:qualified.name`."""

_IDENTIFIER = "[A-Za-z_][A-Za-z0-9_]*"

OperatorName = Annotated[
    str,
    Bounds(
        pattern=f"^{_IDENTIFIER}::{_IDENTIFIER}(\\.{_IDENTIFIER})?$",
        code="operator-malformed",
        fault="not a full operator name",
    ),
]
"""A full operator name."""

ExtensionName = Annotated[
    str,
    Bounds(pattern="^x-[a-z0-9]+(-[a-z0-9]+)*$", maxLength=64, code="name-malformed", fault="not named `x-...`"),
]
"""A name that no version of the format gives a meaning: `x-`, the vendor, and what it is."""

OperatorSet = Annotated[
    str, Bounds(pattern=r"^[a-z]+\.[a-z]+/[1-9][0-9]{0,3}$", code="operator-set-unknown", apart=True)
]
"""An operator set with its version."""

Namespace = Annotated[str, Bounds(pattern=f"^{_IDENTIFIER}$", code="name-malformed", fault="no identifier")]
"""A namespace of operators."""

ModulePath = Annotated[
    str, Bounds(pattern=f"^{_IDENTIFIER}(\\.{_IDENTIFIER})*$", code="name-malformed", fault="no path of a module")
]
"""A Python module."""

Identifier = Annotated[str, Bounds(code="name-malformed", fault="not an identifier", holds=is_identifier)]
"""A name as Python's code has it; none of its keywords."""

Line = Annotated[
    str,
    Bounds(maxLength=MAX_TEXT, code="text-malformed", fault="too long or not printable", holds=str.isprintable),
]
"""Text that is shown in one line."""

KernelName = Annotated[
    str,
    Bounds(
        pattern="^[A-Za-z_][A-Za-z0-9_]{0,199}$",
        maxLength=200,
        code="kernel-malformed",
        fault="no name of a kernel or of its argument",
    ),
]
"""The name of a kernel, or of its argument."""

Architecture = Annotated[
    str, Bounds(pattern="^(sm_[1-9][0-9]{1,2}|ptx)$", code="kernel-malformed", fault="no architecture")
]
"""What compiled code is for."""

NonNegative = Annotated[float, Bounds(minimum=0, code="vector-malformed")]
"""How far a value is off."""
