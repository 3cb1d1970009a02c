"""Checks that follow from what records declare: bounds, lengths, and references to records that are at hand.

A refusal names the field. Sizes, metadata, arguments and the insides of trees declare nothing: see their own checks.
"""

from __future__ import annotations

import typing
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cache
from operator import attrgetter
from typing import Annotated, Any

from aotexport_runtime.errors import BundleInvalid, Place
from aotexport_runtime.schema import bounded, trees, values
from aotexport_runtime.schema.bounded import Record
from aotexport_runtime.schema.program import SizeInput
from aotexport_runtime.schema.sizes import SizeExpression
from aotexport_runtime.validate.arguments import first_twice
from aotexport_runtime.validate.trees import check_tree
from aotexport_runtime.values.sizes import check_size

_NOWHERE = Place("")
_REFERENCES = (bounded.IndexOf, bounded.TensorOf, bounded.NameOf, bounded.Over, bounded.Length)

Step = str | int
Found = Iterable[tuple[tuple[Step, ...], tuple[bool, str, str]]]
"""Faults: the steps to each; whether it is one of a reference, its check and its message."""


class _Around:
    """The records around a value, by name (None: what it would refer to has nothing)."""

    def __init__(self, records: dict[str, Record | None]) -> None:
        self.records = records
        self._names: dict[tuple[str, int], frozenset[Any]] = {}

    def find(self, of: str) -> Any:
        """Return the field that `Record.field` leads to."""
        name, field, *_ = of.split(".")
        record = self.records[name]
        return () if record is None else getattr(record, field)

    def names(self, of: str) -> frozenset[Any]:
        """Return the keys of a map, the items of an array, or what its records have in the last part of `of`."""
        found = self.find(of)
        key = of, id(found)
        if key not in self._names:
            fields = of.split(".")[2:]
            self._names[key] = frozenset(map(attrgetter(*fields), found) if fields else found)
        return self._names[key]


Check = Callable[[Any, _Around], Found]


def check_declared(record: Record, where: Place, **around: Record | None) -> bool:
    """Refuse a record that is not as its fields, and those of the records in it, declare; return whether it is.

    `around`: further records that its references lead to, by the names there; None: it has nothing.
    """
    before, found = where.found, [*_faults(record, _Around(around))]
    # What refers to a malformed name would be told for it.
    malformed = [fault for fault in found if not fault[1][0]]
    for steps, (_, name, message) in malformed or found:
        where.at(*steps).refuse(message, name)
    return where.found == before


@cache
def _fields(record: type[Record]) -> list[tuple[str, Check]]:
    """Return the fields that declare something, each with the check of its values."""
    hints = typing.get_type_hints(record, include_extras=True)
    checks = {field: _check_of(hints[field], f"{record.__name__}.{field}") for field in record.__struct_fields__}
    return [(field, check) for field, check in checks.items() if check is not None]


def _faults(record: Record, around: _Around, fields: Iterable[tuple[str, Check]] | None = None) -> Found:
    records, name = around.records, type(record).__name__
    outer = records.get(name)
    records[name] = record
    found = [
        ((field, *steps), fault)
        for field, check in (_fields(type(record)) if fields is None else fields)
        for steps, fault in check(getattr(record, field), around)
    ]
    records[name] = outer
    return found


def _each_record(kind: type[Record]) -> Check:
    def check(values: Sequence[Record], around: _Around) -> Found:
        fields = [(field, check) for field, check in _fields(kind) if not _all_pass(field, check, values, around)]
        faults = [_faults(value, around, fields) for value in values] if fields else ()
        return [((i, *steps), fault) for i, found in enumerate(faults) for steps, fault in found]

    return check


def _all_pass(field: str, check: Check, records: Sequence[Record], around: _Around) -> bool:
    """Return whether a field has numbers and text alone, which graphs repeat, and all pass."""
    different = {id(value): value for value in map(attrgetter(field), records)}
    return all(isinstance(value, int | str | None) and not check(value, around) for value in different.values())


def is_walked(hint: Any) -> bool:
    """Return whether a type is a record that may declare something."""
    is_record = isinstance(hint, type) and issubclass(hint, Record) and hint is not SizeExpression
    return is_record and hint.__module__ not in (values.__name__, trees.__name__)


def _check_of(hint: Any, subject: str) -> Check | None:
    """Return the check of the values of a type; None: it declares nothing."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if is_walked(hint):
        return _faults
    if origin is Annotated:
        # A type that is checked apart is so with what is in it.
        is_apart = any(isinstance(rule, bounded.Bounds) and rule.apart for rule in arguments[1:])
        inner = None if is_apart else _check_of(arguments[0], subject)
        rules = [_rule(rule, subject, arguments[0]) for rule in declared_rules(arguments[1:])]
        found = rules if inner is None else [inner, *rules]
        if len(found) < 2:
            return next(iter(found), None)
        return lambda value, around: [fault for check in found for fault in check(value, around)]
    checks = [_check_of(argument, subject) for argument in arguments]
    if not any(checks):
        return None
    if origin in (tuple, list):
        return _each_record(arguments[0]) if is_walked(arguments[0]) else _each(checks[0], None, enumerate)
    if origin is dict:
        return _each(checks[1], checks[0], dict[str, Any].items)
    arms = {_class_of(arm): check for arm, check in zip(arguments, checks, strict=True) if check is not None}
    return lambda value, around: arms[type(value)](value, around) if type(value) in arms else ()


def declared_rules(rules: tuple[Any, ...]) -> list[Any]:
    """Return what a type declares, without bounds of what refers: it is right if what it refers to is."""
    limits = [rule for rule in rules if isinstance(rule, bounded.AtMost | bounded.Unique)]
    references = [rule for rule in rules if isinstance(rule, _REFERENCES)]
    if any(not isinstance(rule, bounded.Length | bounded.TensorOf) for rule in references):
        return limits + references
    code = next((rule.code for rule in rules if isinstance(rule, bounded.Code)), "")
    bounds = [rule for rule in rules if isinstance(rule, bounded.Bounds) and not rule.apart]
    return [*limits, *(replace(rule, code=code or rule.code) for rule in bounds), *references]


def _class_of(hint: Any) -> type:
    """Return the class that the values of a type have; it is no union."""
    if typing.get_origin(hint) is Annotated:
        return _class_of(typing.get_args(hint)[0])
    return typing.get_origin(hint) or hint


def _each(item: Check | None, key: Check | None, steps_of: Callable[[Any], Iterable[tuple[Step, Any]]]) -> Check:
    """Return the check of the items of an array, or of the keys and values of a map."""

    def check(values: Any, around: _Around) -> Found:
        return [
            ((step, *steps), fault)
            for step, value in steps_of(values)
            for steps, fault in (*(key(step, around) if key else ()), *(item(value, around) if item else ()))
        ]

    return check


def _rule(rule: Any, subject: str, type_: Any) -> Check:
    """Return the check of one thing that a field of a type declares; its name has the field behind the code."""
    refers, check_name, subject = isinstance(rule, _REFERENCES), f"{rule.code}/{subject}", f"`{subject}`"
    if isinstance(rule, bounded.Unique) and rule.by:
        subject = " and ".join(f"`{typing.get_args(type_)[0].__name__}.{field}`" for field in rule.by.split())
    name = getattr(rule, "of", "").partition(".")[0]

    def check(value: Any, around: _Around) -> Found:
        if name and name not in around.records:
            return ()
        try:
            message = _fault(rule, value, around, subject)
        except BundleInvalid as error:
            # Sizes and trees have checks of their own.
            return (((), (refers, error.check, error.reason)),)
        return () if message is None else (((), (refers, check_name, message)),)

    return check


def _fault(rule: Any, value: Any, around: _Around, subject: str) -> str | None:
    """Return what is wrong with a value that a field declares, in words; None: nothing."""
    match rule:
        case bounded.IndexOf():
            entries = around.find(rule.of) if rule.of else ()
            count = entries if isinstance(entries, int) else len(entries)
            if isinstance(value, int):
                return None if 0 <= value < count else f"{subject} is {value}, out of range({count})"
            if value is not None:
                check_tree(value, count, _NOWHERE)
        case bounded.Bounds() if not rule.takes(value):
            if isinstance(value, str):
                return f"{subject} {value[:80]!r} is {rule.fault}"
            if isinstance(value, tuple):
                return f"{subject} has {len(value)} items; at least {rule.minItems} must be there"
            limit = f"at least {rule.minimum}" if value < (rule.minimum or 0) else f"at most {rule.maximum}"
            return f"{subject} is {value}; {limit} is expected"
        case bounded.AtMost() if rule.most < value <= bounded.INT64_MAX:
            return f"{subject} is {value}; at most {rule.most} is read"
        case bounded.Unique():
            fields = rule.by.split()
            twice = first_twice([" ".join(str(getattr(v, f)) for f in fields) for v in value] if fields else value)
            return None if twice is None else f"{subject} {twice[:80]!r} occurs twice"
        case bounded.Length() if len(value) != (expected := len(around.find(rule.of))):
            return f"{subject} has {len(value)} items, and `{rule.of}` {expected}"
        case bounded.NameOf() if value not in around.names(rule.of):
            return f"{subject} {value[:80]!r} is not in `{rule.of}`"
        case bounded.TensorOf():
            found = around.find(rule.of)[value : value + 1]
            if found and isinstance(found[0], SizeInput | None):
                return f"{subject} is {value}, which is no tensor"
        case bounded.Over():
            check_size(value, around.names(rule.of), where=_NOWHERE)
        case _:
            pass
    return None
