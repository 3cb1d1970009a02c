"""The base of every record: frozen, keyword-only, strict, and without its defaults in JSON."""

from __future__ import annotations

import functools
from typing import dataclass_transform

import msgspec


# Type checkers do not see that records inherit `frozen`.
@dataclass_transform(frozen_default=True, field_specifiers=(msgspec.field,))
class Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A plain value of the format.

    Unknown fields are refused when decoding, since a dropped field changes numbers; a field that equals its
    default is left out when encoding, so that the bytes of an old feature do not change with a new one.
    """


def keep_default(record: Record, field: str) -> None:
    """Put the default itself in place of a value that equals it: the encoder leaves out by identity.

    Called from `__post_init__` of records with a default that is neither a number, a literal nor empty.
    """
    value = _default(type(record), field)
    if getattr(record, field) == value:
        msgspec.structs.force_setattr(record, field, value)


@functools.cache
def _default(kind: type[Record], field: str) -> object:
    return next(each.default for each in msgspec.structs.fields(kind) if each.name == field)
