"""Numbers and text with bounds: the JSON Schemas state them, and `validate` checks them, by messages of its own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

MAX_AXES = 64
MAX_TEXT = 1000
MAX_TERMS = 500
MAX_QUANTILES = 65
INT64_MAX = (1 << 63) - 1


@dataclass(frozen=True)
class Bounds:
    """Keywords of JSON Schema, by their names there; None: not stated."""

    minimum: int | None = None
    maximum: int | None = None
    pattern: str | None = None
    maxLength: int | None = None  # noqa: N815 (a keyword of JSON Schema)
    minItems: int | None = None  # noqa: N815
    maxItems: int | None = None  # noqa: N815


Count = Annotated[int, Bounds(minimum=0, maximum=INT64_MAX)]
"""An index, or how many there are of something."""

Positive = Annotated[int, Bounds(minimum=1, maximum=INT64_MAX)]
"""A number from 1."""

Axes = Annotated[tuple[Count, ...], Bounds(maxItems=MAX_AXES)]
"""A number per axis of a stored tensor."""

Digest = Annotated[str, Bounds(pattern="^[0-9a-f]{64}$", maxLength=64)]
"""A SHA-256 in lower-case hexadecimal."""

Hexadecimal = Annotated[str, Bounds(pattern="^([0-9a-f]{2})*$")]
"""Bytes, two digits each."""

VersionText = Annotated[str, Bounds(pattern=r"^(0|[1-9][0-9]{0,3})\.(0|[1-9][0-9]{0,3})$")]
"""`MAJOR.MINOR`."""

PlainName = Annotated[str, Bounds(pattern="^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$", maxLength=64)]
"""A name that is also part of a path."""

_PART = "[A-Za-z0-9_]([A-Za-z0-9_.+=@-]{0,126}[A-Za-z0-9_+=@-])?"

FilePath = Annotated[str, Bounds(pattern=f"^{_PART}(/{_PART})*$", maxLength=MAX_TEXT)]
"""A path of a file inside the bundle."""

ClassName = Annotated[
    str,
    Bounds(
        pattern=r"^[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)*:"
        r"[A-Za-z_][A-Za-z0-9_]*(\.([A-Za-z_][A-Za-z0-9_]*|<locals>))*$",
        maxLength=MAX_TEXT,
    ),
]
"""A class, `module:qualified.name`."""

_IDENTIFIER = "[A-Za-z_][A-Za-z0-9_]*"

OperatorName = Annotated[str, Bounds(pattern=f"^{_IDENTIFIER}::{_IDENTIFIER}(\\.{_IDENTIFIER})?$")]
"""A full operator name."""

ExtensionName = Annotated[str, Bounds(pattern="^x-[a-z0-9]+(-[a-z0-9]+)*$", maxLength=64)]
"""A name that no version of the format gives a meaning: `x-`, the vendor, and what it is."""

OperatorSet = Annotated[str, Bounds(pattern=r"^[a-z]+\.[a-z]+/[1-9][0-9]{0,3}$")]
"""An operator set with its version."""

Namespace = Annotated[str, Bounds(pattern=f"^{_IDENTIFIER}$")]
"""A namespace of operators."""

Line = Annotated[str, Bounds(maxLength=MAX_TEXT)]
"""Text that is shown in one line."""
