"""All places where plain JSON is not of a record's type; decoding says the first only, and no keys of maps."""

from __future__ import annotations

import json
import types
from collections.abc import Iterator
from typing import Annotated, Any, TypeGuard, Union, get_args, get_origin

import msgspec

from aotexport_runtime.errors import BundleInvalid, Place

MAX_MESSAGE = 300
"""Characters of a message of msgspec that are shown."""

Steps = tuple[str | int, ...]


def structure_faults(value: Any, type_: Any, place: Place) -> list[BundleInvalid]:
    """Return what is wrong with the structure of plain JSON that must be of a type, each fault with its place."""
    try:
        msgspec.convert(value, type=type_)
    except msgspec.ValidationError as error:
        member = _member(value, type_)
        found = [_fault(message, place) for message in _wrong_names(value, member)]
        for step, item, item_type in _children(value, member):
            found += structure_faults(item, item_type, place.at(step))
        return found or [_fault(str(error), place)]
    return []


def _fault(message: str, place: Place) -> BundleInvalid:
    return place.invalid(message.partition(" - at `")[0][:MAX_MESSAGE], "json-record/record")


def untagged(value: Any, type_: Any, steps: Steps = ()) -> Iterator[Steps]:
    """Yield the paths of the records that lack their tag, in plain JSON that decodes to a type."""
    member = _member(value, type_)
    if _is_record(member) and _is_object(value) and member.__struct_config__.tag is not None and "kind" not in value:
        yield steps
    for step, item, item_type in _children(value, member):
        yield from untagged(item, item_type, (*steps, step))


def twice(data: bytes) -> Iterator[Steps]:
    """Yield the paths of keys that an object has already, in JSON that decodes; decoding keeps the last."""
    # Numbers may have more digits than Python reads.
    return _twice(json.loads(data, object_pairs_hook=_Pairs, parse_int=len, parse_float=len), ())


class _Pairs(list[tuple[str, Any]]):
    """An object's keys with their values, in order."""


def _twice(value: Any, steps: Steps) -> Iterator[Steps]:
    seen = set[str | int]()
    for step, item in value if isinstance(value, _Pairs) else enumerate(value) if _is_array(value) else ():
        if step in seen:
            yield (*steps, step)
        seen.add(step)
        yield from _twice(item, (*steps, step))


def _member(value: Any, type_: Any) -> Any:
    """Return the one type of a union that fits the shape and the tag of `value`; None: there is none."""
    if get_origin(type_) is Annotated:
        return _member(value, get_args(type_)[0])
    if get_origin(type_) not in (Union, types.UnionType):
        return type_
    members = [_member(value, member) for member in get_args(type_)]
    if _is_object(value):
        records = [each for each in members if _is_record(each)]
        tagged = [each for each in records if each.__struct_config__.tag == value.get(each.__struct_config__.tag_field)]
        untagged_ones = records if len(records) == 1 else [r for r in records if r.__struct_config__.tag is None]
        return next(iter([*tagged, *untagged_ones]), None)
    return next((each for each in members if get_origin(each) in (list, tuple)), None) if _is_array(value) else None


def _is_record(type_: Any) -> bool:
    return isinstance(type_, type) and issubclass(type_, msgspec.Struct)


def _is_array(value: Any) -> TypeGuard[list[Any]]:
    return isinstance(value, list)


def _is_object(value: Any) -> TypeGuard[dict[str, Any]]:
    return isinstance(value, dict)


def _wrong_names(value: Any, type_: Any) -> Iterator[str]:
    if not (_is_record(type_) and _is_object(value)):
        return
    fields = msgspec.structs.fields(type_)
    known = {field.encode_name for field in fields} | {type_.__struct_config__.tag_field}
    yield from (f"Object contains unknown field `{name}`" for name in value if name not in known)
    yield from (
        f"Object missing required field `{field.encode_name}`"
        for field in fields
        if field.required and field.encode_name not in value
    )


def _children(value: Any, type_: Any) -> Iterator[tuple[str | int, Any, Any]]:
    origin, arguments = get_origin(type_), get_args(type_)
    if _is_record(type_) and _is_object(value):
        fields = msgspec.structs.fields(type_)
        yield from ((f.encode_name, value[f.encode_name], f.type) for f in fields if f.encode_name in value)
    elif origin in (list, tuple) and _is_array(value):
        yield from ((index, item, arguments[0]) for index, item in enumerate(value))
    elif origin is dict and _is_object(value):
        yield from ((key, item, arguments[1]) for key, item in value.items())
