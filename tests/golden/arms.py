"""Which arms of the format's unions a record makes use of, and which arms there are.

An arm is written `place: what`, for example `Tree: Mapping`, `InputMutation.metadata: true` or `DType: "int8"`. Its
place is a field, or the named type that the field takes, so that one golden with a complex argument covers all
places where an argument may stand.
"""

import functools
from collections.abc import Iterator
from typing import Any

from catalogue import NAMED_TYPES, hints, records, union_of

from aotexport_runtime.schema.bounded import Record

NAMED_UNIONS = {name: union_of(type_, within=name) for name, (type_, _) in NAMED_TYPES.items()}


def all_arms() -> set[str]:
    """Return every arm of every union of the format."""
    found: set[str] = set()
    for record in records():
        for field, hint in hints(record).items():
            found |= set(_listed(f"{record.__name__}.{field}", union_of(hint)))
    for name, union in NAMED_UNIONS.items():
        found |= set(_listed(name, union))
    return found


def _listed(place: str, union: list[Any]) -> Iterator[str]:
    arms = [*union]
    if arms == ["bool"]:
        arms = ["true", "false"]
    if len(arms) > 1 or arms[0] not in ("int", "string", "float", "any"):
        yield from (f"{place}: {_name(arm)}" for arm in arms if not _is_alone(arm, arms))
    for arm in union:
        if isinstance(arm, dict):
            yield from _listed(f"{place}[]", *arm.values())


def _is_alone(arm: Any, arms: list[Any]) -> bool:
    """Return whether `arm` is no choice: the only arm, or a name whose own arms are listed elsewhere."""
    return len(arms) == 1 and (isinstance(arm, dict) or arm in NAMED_UNIONS or arm[0].isupper())


def _name(arm: Any) -> str:
    return arm if isinstance(arm, str) else next(iter(arm))


def arms_of(record: Record) -> set[str]:
    """Return the arms that `record`, and everything in it, makes use of."""
    found: set[str] = set()
    for field, union in _unions(type(record)).items():
        _visit(getattr(record, field), union, f"{type(record).__name__}.{field}", found)
    return found


@functools.cache
def _unions(type_: type[Record]) -> dict[str, list[Any]]:
    return {field: union_of(hint) for field, hint in hints(type_).items()}


def _visit(value: Any, union: list[Any], place: str, found: set[str]) -> None:
    arm = next(arm for arm in union if _fits(value, arm))
    found.add(f"{place}: {str(value).lower() if union == ['bool'] else _name(arm)}")
    if isinstance(arm, dict):
        ((kind, items),) = arm.items()
        for item in value.values() if kind == "map" else value:
            _visit(item, items, f"{place}[]", found)
    elif arm in NAMED_UNIONS:
        _visit(value, NAMED_UNIONS[arm], arm, found)
    elif isinstance(value, Record):
        found |= arms_of(value)


def _fits(value: Any, arm: Any) -> bool:
    if isinstance(arm, dict):
        return isinstance(value, dict) if "map" in arm else isinstance(value, list | tuple)
    if arm in NAMED_UNIONS:
        return any(_fits(value, inner) for inner in NAMED_UNIONS[arm])
    if isinstance(value, Record):
        return arm == type(value).__name__
    if isinstance(value, str):
        return arm in ("string", f'"{value}"')
    return arm == {bool: "bool", int: "int", float: "float", type(None): "null"}.get(type(value))
