"""Checks that follow from what the records declare: bounds, lengths, and references between them.

`schema/bounded.py` and `schema/references.py` have the words. A refusal names the field, and its place is the value.
A reference into a record that is not at hand is passed over. Sizes, metadata, arguments and the insides of trees
declare nothing: they mean something in their place alone.
"""

from __future__ import annotations

import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from operator import attrgetter
from typing import Annotated, Any, NamedTuple

from aotexport_runtime.errors import BundleInvalid, Place
from aotexport_runtime.schema import trees, values
from aotexport_runtime.schema.base import Record
from aotexport_runtime.schema.bounded import (
    INT64_MAX,
    AtMost,
    Bounds,
    Code,
    IndexOf,
    Length,
    NameOf,
    Over,
    TensorOf,
    Unique,
)
from aotexport_runtime.schema.program import SizeInput
from aotexport_runtime.schema.sizes import SizeExpression
from aotexport_runtime.validate.bounds import first_twice
from aotexport_runtime.validate.trees import check_tree
from aotexport_runtime.values.sizes import check_size

_NOWHERE = Place("")
_REFERENCES = (IndexOf, TensorOf, NameOf, Over, Length)

Step = str | int
Found = Iterable[tuple[tuple[Step, ...], str, str]]
"""Faults: the steps to each, its check and its message."""


class _Around:
    """The records around a value, by name (None: what it would refer to has nothing), and which rules are checked."""

    def __init__(self, records: dict[str, Record | None], *, refers: bool) -> None:
        self.records = records
        self.refers = refers
        self._names: dict[tuple[str, int], frozenset[Any]] = {}

    def find(self, of: str) -> Any:
        """Return the field that `Record.field` leads to."""
        name, field, *_ = _path(of)
        record = self.records[name]
        return () if record is None else getattr(record, field)

    def names(self, of: str) -> frozenset[Any]:
        """Return the keys of a map, the items of an array, or what its records have in the last part of `of`."""
        found = self.find(of)
        key = of, id(found)
        if key not in self._names:
            fields = _path(of)[2:]
            self._names[key] = frozenset(map(attrgetter(*fields), found) if fields else found)
        return self._names[key]


Check = Callable[[Any, _Around], Found]


@cache
def _path(of: str) -> list[str]:
    return of.split(".")


def check_declared(record: Record, where: Place, **around: Record | None) -> None:
    """Refuse a record that is not as its fields, and those of the records in it, declare.

    Args:
        record: as decoded.
        where: for errors.
        around: further records that its references lead to, by the names there; None: it has nothing.
    """
    faults = where.found
    # What refers to a malformed name would be told for it.
    for refers in (False, True):
        for steps, name, message in _faults(record, _Around(around, refers=refers)) if where.found == faults else ():
            where.at(*steps).refuse(message, name)


class _Field(NamedTuple):
    """A field that declares something.

    Attributes:
        name: its name.
        check: of its values.
        plain: whether these are numbers and text, which is checked once for all records that have the same.
    """

    name: str
    check: Check
    plain: bool


@cache
def _fields(record: type[Record], refers: bool) -> list[_Field]:
    hints = typing.get_type_hints(record, include_extras=True)
    checks = {
        field: _check_of(hints[field], f"{record.__name__}.{field}", refers) for field in record.__struct_fields__
    }
    return [_Field(field, check, _is_plain(hints[field])) for field, check in checks.items() if check is not None]


def _faults(record: Record, around: _Around, fields: Iterable[_Field] | None = None) -> Found:
    records, name = around.records, type(record).__name__
    outer = records.get(name)
    records[name] = record
    found = [
        ((field.name, *steps), name, message)
        for field in (_fields(type(record), around.refers) if fields is None else fields)
        for steps, name, message in field.check(getattr(record, field.name), around)
    ]
    records[name] = outer
    return found


def _each_record(kind: type[Record]) -> Check:
    def check(values: Sequence[Record], around: _Around) -> Found:
        fields = [
            field for field in _fields(kind, around.refers) if not (field.plain and _all_pass(field, values, around))
        ]
        found = enumerate(_faults(value, around, fields) for value in values) if fields else ()
        return [((index, *steps), name, message) for index, faults in found for steps, name, message in faults]

    return check


def _all_pass(field: _Field, values: Sequence[Record], around: _Around) -> bool:
    found = [getattr(record, field.name) for record in values]
    different = {value if isinstance(value, str) else id(value): value for value in found}
    return not any(field.check(value, around) for value in different.values())


def is_walked(hint: Any) -> bool:
    """Return whether a type is a record that may declare something."""
    is_record = isinstance(hint, type) and issubclass(hint, Record) and hint is not SizeExpression
    return is_record and hint.__module__ not in (values.__name__, trees.__name__)


def _is_plain(hint: Any) -> bool:
    if typing.get_origin(hint) in (Annotated, typing.Union, types.UnionType):
        return all(map(_is_plain, typing.get_args(hint)[: 1 if typing.get_origin(hint) is Annotated else None]))
    return hint in (int, str, float, types.NoneType) or getattr(hint, "__module__", "") == values.__name__


def _check_of(hint: Any, subject: str, refers: bool) -> Check | None:
    """Return the check of the values of a type; None: it declares nothing."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if is_walked(hint):
        return _faults
    if origin is Annotated:
        checks = [_rule(rule, subject, arguments[0]) for rule in declared_rules(arguments[1:], refers=refers)]
        inner = None if any(_is_left(rule) for rule in arguments[1:]) else _check_of(arguments[0], subject, refers)
        return _all([inner, *checks] if inner else checks)
    checks = [_check_of(argument, subject, refers) for argument in arguments]
    if not any(checks):
        return None
    if origin in (tuple, list):
        return _each_record(arguments[0]) if is_walked(arguments[0]) else _each(checks[0])
    if origin is dict:
        return _entries(*checks)
    arms = {_class_of(arm): check for arm, check in zip(arguments, checks, strict=True) if check is not None}
    return lambda value, around: arms[type(value)](value, around) if type(value) in arms else ()


def declared_rules(rules: tuple[Any, ...], *, refers: bool) -> list[Any]:
    """Return the references, or all else, without bounds of what refers: it is right if what it refers to is."""
    if refers:
        return [rule for rule in rules if isinstance(rule, _REFERENCES)]
    code = next((rule.code for rule in rules if isinstance(rule, Code)), "")
    bounds = [replace(rule, code=code or rule.code) for rule in rules if isinstance(rule, Bounds) and not rule.apart]
    is_name = any(isinstance(rule, IndexOf | NameOf | Over) for rule in rules)
    return [rule for rule in rules if isinstance(rule, AtMost | Unique)] + ([] if is_name else bounds)


def _is_left(rule: Any) -> bool:
    """Return whether a type is checked elsewhere, with what is in it."""
    return isinstance(rule, Bounds) and rule.apart


def _class_of(hint: Any) -> type:
    """Return the class that the values of a type have; it is no union."""
    if typing.get_origin(hint) is Annotated:
        return _class_of(typing.get_args(hint)[0])
    return typing.get_origin(hint) or hint


def _all(checks: list[Check]) -> Check | None:
    if len(checks) < 2:
        return next(iter(checks), None)
    return lambda value, around: [fault for check in checks for fault in check(value, around)]


def _each(check: Check | None) -> Check | None:
    return check and (
        lambda values, around: [
            ((index, *steps), name, message)
            for index, value in enumerate(values)
            for steps, name, message in check(value, around)
        ]
    )


def _entries(key: Check | None, value: Check | None) -> Check:
    def check(entries: Mapping[str, Any], around: _Around) -> Found:
        for name, item in entries.items():
            found = [*(key(name, around) if key else ()), *(value(item, around) if value else ())]
            yield from (((name, *steps), name, message) for steps, name, message in found)

    return check


def _rule(rule: Any, subject: str, type_: Any) -> Check:
    """Return the check of one thing that a field of a type declares; its name has the field behind the code."""
    check_name, subject = f"{rule.code}/{subject}", f"`{subject}`"
    if isinstance(rule, Unique) and rule.by:
        subject = " and ".join(f"`{typing.get_args(type_)[0].__name__}.{field}`" for field in rule.by.split())
    name = _path(getattr(rule, "of", ""))[0]
    fault = _FAULTS[type(rule)]

    def check(value: Any, around: _Around) -> Found:
        if name == "" or name in around.records:
            try:
                message = fault(rule, value, around, subject)
            except BundleInvalid as error:
                # Sizes and trees have checks of their own.
                return (((), error.check, error.reason),)
            if message is not None:
                return (((), check_name, message),)
        return ()

    return check


def _beyond_bounds(rule: Bounds, value: Any, around: _Around, subject: str) -> str | None:
    if rule.takes(value):
        return None
    if isinstance(value, str):
        return f"{subject} {value[:80]!r} is {rule.fault}"
    if isinstance(value, tuple):
        return f"{subject} has {len(value)} items; at least {rule.minItems} must be there"
    limit = f"at least {rule.minimum}" if value < (rule.minimum or 0) else f"at most {rule.maximum}"
    return f"{subject} is {value}; {limit} is expected"


def _above(rule: AtMost, value: int, around: _Around, subject: str) -> str | None:
    return f"{subject} is {value}; at most {rule.most} is read" if rule.most < value <= INT64_MAX else None


def _twice(rule: Unique, values: Iterable[Any], around: _Around, subject: str) -> str | None:
    fields = rule.by.split()
    name = first_twice([" ".join(str(getattr(v, f)) for f in fields) for v in values] if fields else values)
    return None if name is None else f"{subject} {name[:80]!r} occurs twice"


def _other_length(rule: Length, value: Any, around: _Around, subject: str) -> str | None:
    expected = len(around.find(rule.of))
    return None if len(value) == expected else f"{subject} has {len(value)} items, and `{rule.of}` {expected}"


def _unknown(rule: NameOf, name: str, around: _Around, subject: str) -> str | None:
    return None if name in around.names(rule.of) else f"{subject} {name[:80]!r} is not in `{rule.of}`"


def _wrong_index(rule: IndexOf, index: int | trees.Tree | None, around: _Around, subject: str) -> str | None:
    entries = around.find(rule.of) if rule.of else ()
    count = entries if isinstance(entries, int) else len(entries)
    if isinstance(index, int):
        return None if 0 <= index < count else f"{subject} is {index}, out of range({count})"
    if index is not None:
        check_tree(index, count, _NOWHERE)
    return None


def _number(rule: TensorOf, index: int, around: _Around, subject: str) -> str | None:
    found = around.find(rule.of)[index : index + 1]
    return f"{subject} is {index}, which is no tensor" if found and isinstance(found[0], SizeInput | None) else None


def _wrong_size(rule: Over, size: Any, around: _Around, subject: str) -> None:
    check_size(size, around.names(rule.of), where=_NOWHERE)


_FAULTS: dict[type, Callable[[Any, Any, _Around, str], str | None]] = {
    Bounds: _beyond_bounds,
    AtMost: _above,
    Unique: _twice,
    Length: _other_length,
    NameOf: _unknown,
    IndexOf: _wrong_index,
    TensorOf: _number,
    Over: _wrong_size,
}
"""What is wrong with a value that a field declares, in words; None: nothing."""
