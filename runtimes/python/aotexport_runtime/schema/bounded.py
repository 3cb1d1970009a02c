"""The base of records, and what fields declare beside types: bounds and references; `validate/declared.py` checks them.

What a field refers to is written `Record.field`, of a record that it is in or belongs to; `Plain`: see `taken_apart`.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from keyword import iskeyword
from typing import Annotated, Any, dataclass_transform, get_args

import msgspec

MAX_NODES = 1_000_000
MAX_AXES = 64
MAX_TEXT = 1000
MAX_TERMS = 500
MAX_QUANTILES = 65
INT64_MAX = (1 << 63) - 1


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """Keywords of JSON Schema, None: not stated; and how a reader refuses what is outside.

    Attributes:
        apart: whether a check of its own has the bounds, with more around the value.
        fault: what is wrong with a text, in words.
        holds: a further condition, which no keyword can say.
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
Positive = Annotated[int, Bounds(minimum=1, maximum=INT64_MAX, code="index-range")]
Whole = Annotated[int, Bounds(minimum=-INT64_MAX, maximum=INT64_MAX, code="number-limit")]
NonNegative = Annotated[float, Bounds(minimum=0, code="vector-malformed")]
Offset = Annotated[int, Bounds(minimum=0, maximum=INT64_MAX, code="tensor-layout", apart=True)]
"""Where a tensor begins in its storage."""
Axes = Annotated[tuple[Count, ...], Bounds(maxItems=MAX_AXES, code="tensor-layout", apart=True)]
"""A number per axis of a stored tensor."""

_IDENTIFIER = "[A-Za-z_][A-Za-z0-9_]*"
_PLAIN = "^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$"
_PART = "[A-Za-z0-9_]([A-Za-z0-9_.+=@-]{0,126}[A-Za-z0-9_+=@-])?"
_PATH = f"^{_PART}(/{_PART})*$"
_CLASS = rf"^{_IDENTIFIER}(\.{_IDENTIFIER})*:{_IDENTIFIER}(\.({_IDENTIFIER}|<locals>))*$"
_OPERATOR = rf"^{_IDENTIFIER}::{_IDENTIFIER}(\.{_IDENTIFIER})?$"
_NUMBER = "(0|[1-9][0-9]{0,3})"


def _text(code: str, fault: str, pattern: str | None = None, most: int | None = None) -> Bounds:
    return Bounds(code=code, fault=fault, pattern=pattern, maxLength=most)


Line = Annotated[
    str, Bounds(maxLength=MAX_TEXT, code="text-malformed", fault="too long or not printable", holds=str.isprintable)
]
"""Text that is shown in one line."""
Digest = Annotated[str, _text("text-malformed", "not a digest of 64 digits", "^[0-9a-f]{64}$", 64)]
"""A SHA-256 in lower-case hexadecimal."""
Hexadecimal = Annotated[str, Bounds(pattern="^([0-9a-f]{2})*$", code="structure-malformed", apart=True)]
VersionText = Annotated[str, Bounds(pattern=rf"^{_NUMBER}\.{_NUMBER}$", code="version-malformed", apart=True)]
PlainName = Annotated[str, _text("name-malformed", "not a plain name", _PLAIN, 64)]
"""A name that is also part of a path."""
OwnName = Annotated[str, Bounds(pattern=_PLAIN, maxLength=64, code="program-malformed", apart=True)]
"""The name by which another record, or a folder, leads to the record that the name is in."""
FilePath = Annotated[str, _text("file-path", "not a plain relative path", _PATH, MAX_TEXT)]
ClassName = Annotated[str, _text("name-malformed", "not the name of a class", _CLASS, MAX_TEXT)]
"""A class, `module:qualified.name`."""
OperatorName = Annotated[str, _text("operator-malformed", "not a full operator name", _OPERATOR)]
OperatorSet = Annotated[
    str, Bounds(pattern=r"^[a-z]+\.[a-z]+/[1-9][0-9]{0,3}$", code="operator-set-unknown", apart=True)
]
ExtensionName = Annotated[str, _text("name-malformed", "not named `x-...`", "^x-[a-z0-9]+(-[a-z0-9]+)*$", 64)]
Namespace = Annotated[str, _text("name-malformed", "no identifier", f"^{_IDENTIFIER}$")]
ModulePath = Annotated[str, _text("name-malformed", "no path of a module", rf"^{_IDENTIFIER}(\.{_IDENTIFIER})*$")]
Identifier = Annotated[str, Bounds(code="name-malformed", fault="not an identifier", holds=is_identifier)]
"""A name as Python's code has it; none of its keywords."""
KernelName = Annotated[
    str, _text("kernel-malformed", "no name of a kernel or of its argument", "^[A-Za-z_][A-Za-z0-9_]{0,199}$", 200)
]
Architecture = Annotated[str, _text("kernel-malformed", "no architecture", "^(sm_[1-9][0-9]{1,2}|ptx)$")]


class IndexOf(msgspec.Struct, frozen=True):
    """An index into an array, or below a count; of a tree: the indices of its leaves, without `of` it has none."""

    of: str = ""
    code: str = "index-range"


class TensorOf(msgspec.Struct, frozen=True):
    """An index that leads to a tensor, not to a number."""

    of: str
    code: str = "program-malformed"


class NameOf(msgspec.Struct, frozen=True):
    """A key of a map, an item of an array, or what a record of an array has in a field: `Manifest.programs.name`."""

    of: str
    code: str = "reference-missing"


class Over(msgspec.Struct, frozen=True):
    """A size, or a condition, over symbols, which are named as in `NameOf`."""

    of: str
    code: str = "symbol-undefined"


class Length(msgspec.Struct, frozen=True):
    """An array that is as long as another one."""

    of: str
    code: str


class Unique(msgspec.Struct, frozen=True):
    """An array without anything twice: items, or what records have in fields, which are separated by spaces."""

    by: str = ""
    code: str = "name-twice"


class AtMost(msgspec.Struct, frozen=True):
    """A number with a greatest value for this reader, which the format leaves open."""

    most: int
    code: str = "index-range"


class Code(msgspec.Struct, frozen=True):
    """The code of a refusal of a number or text outside of its type's bounds, in place of the type's."""

    code: str


# Type checkers do not see that records inherit `frozen`.
@dataclass_transform(frozen_default=True, field_specifiers=(msgspec.field,))
class Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A plain value of the format.

    Unknown fields are refused when decoding, since a dropped field changes numbers; a field that equals its
    default is left out when encoding, so that the bytes of an old feature do not change with a new one.
    """


def keep_default(record: Record, field: str) -> None:
    """Put the default, no number nor literal, in place of a value that equals it: encoders leave out by identity."""
    value = defaults_of(type(record))[field]
    if getattr(record, field) == value:
        msgspec.structs.force_setattr(record, field, value)


@cache
def defaults_of(record: type[msgspec.Struct]) -> dict[str, Any]:
    """Return the default of each field of a record."""
    fields = msgspec.structs.fields(record)
    return {f.name: f.default if f.default_factory is msgspec.NODEFAULT else f.default_factory() for f in fields}
