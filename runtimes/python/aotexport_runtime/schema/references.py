"""References between records, declared where a field refers: `validate/declared.py` checks them.

What a field refers to is written `Record.field`: that field of the record of this name that the field is in, or that
its document belongs to. `Plain` is the program whose inputs are plain tensors: each tensor subclass is taken apart.
Each reference has the code of its refusal.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class IndexOf:
    """An index into an array, or below a count; of a tree: the indices of its leaves, without `of` it has none."""

    of: str = ""
    code: str = "index-range"


@dataclass(frozen=True)
class TensorOf:
    """An index that leads to a tensor, not to a number."""

    of: str
    code: str = "program-malformed"


@dataclass(frozen=True)
class NameOf:
    """A key of a map, an item of an array, or what a record of an array has in a field: `Manifest.programs.name`."""

    of: str
    code: str = "reference-missing"


@dataclass(frozen=True)
class Over:
    """A size, or a condition, over symbols, which are named as in `NameOf`."""

    of: str
    code: str = "symbol-undefined"


@dataclass(frozen=True)
class Length:
    """An array that is as long as another one."""

    of: str
    code: str


@dataclass(frozen=True)
class Unique:
    """An array without anything twice: items, or what records have in fields, which are separated by spaces."""

    by: str = ""
    code: str = "name-twice"


@dataclass(frozen=True)
class AtMost:
    """A number with a greatest value for this reader, which the format leaves open."""

    most: int
    code: str = "index-range"


@dataclass(frozen=True)
class Code:
    """The code of a refusal of a number or text outside of its type's bounds, in place of the type's."""

    code: str
