"""Records to canonical JSON bytes and back, strictly.

The same record always gives the same bytes: sorted keys, no timestamps, no absolute paths. Non-finite floats
never reach JSON (`FloatArgument`), since msgspec would write them as null.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, TypeVar

import msgspec
from msgspec.structs import force_setattr

from aotexport_runtime.errors import BundleInvalid, Place
from aotexport_runtime.schema.bounded import Record
from aotexport_runtime.schema.faults import MAX_MESSAGE, twice, untagged
from aotexport_runtime.schema.graph import Graph
from aotexport_runtime.schema.limits import DEFAULT, Limits

T = TypeVar("T", bound=Record)


def encode_record(record: Record, *, indent: bool = True) -> bytes:
    """Return the canonical JSON of `record`, ending in a newline."""
    data = msgspec.json.encode(as_written(record), order="sorted")
    return (msgspec.json.format(data, indent=2) if indent else data) + b"\n"


def as_written(record: T) -> T:
    """Return a copy of `record` as files have it: a graph with tables, and each default as the default itself."""
    # Defaults are left out by identity, which decoding gives to all that equal them.
    copy = msgspec.json.decode(msgspec.json.encode(record), type=type(record))
    if isinstance(copy, Graph):
        _share_in_tables(copy)
    return copy


def decode_record(data: bytes, type_: type[T], *, where: str, limits: Limits = DEFAULT) -> T:
    """Return the record that JSON holds; `where` is its file, for errors.

    Raises:
        BundleInvalid: not JSON, nested too deep, a key twice in one object, not such a record, or an index into a
            table of a graph that is out of range, with the JSON path.
    """
    try:
        keys = check_size_of(data, where, limits)
        try:
            _, compact = _keys_once(data, where, keys)
        except msgspec.DecodeError:
            msgspec.json.decode(data, type=type_)  # Its errors have the path.
            raise
        record = msgspec.json.decode(data, type=type_)
        # Other fields of the name have no default, and keys of maps stay.
        if compact.count(_TAG) != msgspec.json.encode(record).count(_TAG):
            # msgspec asks for the tag only where several records may stand.
            steps = next(untagged(msgspec.json.decode(data), type_), ())
            raise Place(where).at(*steps).invalid("Object missing required field `kind`", "json-record/record")
        if isinstance(record, Graph):
            _resolve_tables(record, Place(where), limits)
        return record
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise refused(error, where) from None


def decode_plain(data: bytes, *, where: str, limits: Limits) -> Any:
    """Return JSON that is no record, decoded; refuse others, beyond limits, or with a key twice (`BundleInvalid`)."""
    try:
        return _keys_once(data, where, check_size_of(data, where, limits))[0]
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise refused(error, where) from None


def _keys_once(data: bytes, where: str, keys: int) -> tuple[Any, bytes]:
    """Return JSON decoded, and encoded again; its objects have so many keys together."""
    plain = msgspec.json.decode(data)
    compact = msgspec.json.encode(plain)
    if msgspec.json.format(data, indent=-1) != compact and nesting(compact)[3] != keys:
        del plain, compact
        # To look for its place takes much more memory than decoding.
        place = Place(where).at(*next(twice(data), ()) if len(data) <= _SEARCHED_NBYTES else ())
        raise place.invalid("an object has the same key twice", "json-key-twice/key")
    return plain, compact


def refused(error: Exception, where: str, said: str = "") -> BundleInvalid:
    """Return what is raised for JSON that msgspec does not decode, by its error; `said` begins the message."""
    message = str(error)[:MAX_MESSAGE]
    is_json = isinstance(error, msgspec.ValidationError) and not message.startswith(_OUT_OF_RANGE)
    found = _PATH.search(message)
    place = Place(where).at(*steps_of(found[1])) if found else where
    return BundleInvalid(said + message, where=place, check="json-record/record" if is_json else "json-malformed/json")


def steps_of(path: str) -> list[str | int]:
    """Return keys and indices of a JSON path as msgspec writes it (`$.nodes[3].args`), up to a key of a map."""
    return [int(index) if index else key for key, index in _STEP.findall(path.partition("[...]")[0])]


def check_size_of(data: bytes, where: str, limits: Limits = DEFAULT) -> int:
    """Return how many keys the objects of `data` have together; refuse it beyond the limits (`BundleInvalid`)."""
    place = Place(where)
    if len(data) > limits.json_nbytes:
        raise place.invalid(f"{len(data)} bytes of JSON; at most {limits.json_nbytes} are read", "json-limit/bytes")
    depth, containers, values, keys = nesting(data, limits)
    place.require(depth <= limits.json_depth, f"nested deeper than {limits.json_depth} levels", "json-limit/depth")
    counts = (containers, limits.json_containers, "lists and objects"), (values, limits.json_values, "values")
    for count, most, subject in counts:
        place.require(count <= most, f"more than the {most} {subject} that are read of a file", "json-limit/containers")
    return keys


def nesting(data: bytes, limits: Limits | None = None) -> tuple[int, int, int, int]:
    """Return the deepest nesting of brackets in `data`, and how many of them are opened, of values at most, of keys.

    What is in strings is not counted. Exact for JSON, as far as the limits, but that an empty list counts as one value
    more; for other bytes, exact up to the first byte that every decoder refuses.
    """
    import numpy as np

    depth = deepest = opened = commas = keys = quotes = 0
    for part in _parts(data):
        # Escapes go first, then all but marks, then pairs of quotes: the parity of the others stays.
        plain = part.replace(b"\\\\", b"").replace(b'\\"', b"").translate(None, _NO_MARKS).replace(b'""', b"")
        codes = np.frombuffer(plain, dtype=np.uint8)
        seen = np.cumsum(codes == ord('"'), dtype=np.int32) + quotes
        quotes = int(seen[-1]) % 2 if len(seen) else quotes
        codes = codes[seen % 2 == 0]
        opening = (codes == ord("[")) | (codes == ord("{"))
        closing = (codes == ord("]")) | (codes == ord("}"))
        running = np.cumsum(opening.astype(np.int8) - closing.astype(np.int8), dtype=np.int32) + depth
        deepest, depth = int(running.max(initial=deepest)), int(running[-1]) if len(running) else depth
        opened += int(np.count_nonzero(opening))
        commas += int(np.count_nonzero(codes == ord(",")))
        keys += int(np.count_nonzero(codes == ord(":")))
        if limits is not None and (
            deepest > limits.json_depth or opened > limits.json_containers or opened + commas > limits.json_values
        ):
            break
    return deepest, opened, opened + commas, keys


def _parts(data: bytes) -> Iterator[bytes]:
    """Yield `data` in parts, none of which ends within an escape."""
    start = 0
    while start < len(data):
        end = start + _CHUNK_NBYTES
        part = data[start:end]
        # An odd number of backslashes ends in one that escapes the next byte.
        end += (len(part) - len(part.rstrip(b"\\"))) % 2
        yield data[start:end]
        start = end


_TAG = b'"kind":'
_PATH = re.compile(r" - at `(\$.*)`$")
_STEP = re.compile(r"\.(\w+)|\[(\d+)\]")
_OUT_OF_RANGE = ("Number out of range", "Integer value out of range")
_CHUNK_NBYTES, _SEARCHED_NBYTES = 1 << 20, 1 << 24
_NO_MARKS = bytes(set(range(256)) - set(b'[]{}",:'))

_USERS = {"metas": (("inputs", "meta"), ("nodes", "meta")), "operators": (("nodes", "op"),)}
"""Per table the fields that may be indexes into it; its entries are in the order in which these use them first."""


def _resolve_tables(graph: Graph, where: Place, limits: Limits) -> None:
    """Put the entries of its tables in the place of indexes, in a graph that was just decoded and in its bodies."""
    nbytes = containers = 0
    for part, place in _with_bodies(graph, where):
        for table in _USERS:
            entries: tuple[Any, ...] = getattr(part, table)
            uses = [0] * len(entries)
            for steps, field, value in _values(part, table):
                index = getattr(value, field)
                if not isinstance(index, int):
                    continue
                if not 0 <= index < len(entries):
                    message = f"index {index} into `{table}` is out of range({len(entries)})"
                    raise place.at(*steps, field).invalid(message, "index-range/table")
                force_setattr(value, field, entries[index])
                uses[index] += 1
            force_setattr(part, table, ())
            for text, count in zip(map(msgspec.json.encode, entries), uses, strict=True):
                nbytes += len(text) * count
                containers += (text.count(b"{") + text.count(b"[")) * count
    if nbytes > limits.json_nbytes or containers > limits.json_containers:
        message = "with what its tables hold in the place of indexes it is larger than what is read of a file"
        raise where.invalid(message, "bundle-limit/tables")


def _share_in_tables(graph: Graph) -> None:
    """Put what inputs and nodes of a graph and of its bodies have into tables, and indexes in its place."""
    for part, _ in _with_bodies(graph, Place("")):
        for table in _USERS:
            # By their text: 1 and 1.0 are equal, and not the same.
            entries: dict[bytes, Any] = {}
            indexes: dict[bytes, int] = {}
            for _, field, value in _values(part, table):
                entry = getattr(value, field)
                text = msgspec.json.encode(entry)
                entries.setdefault(text, entry)
                force_setattr(value, field, indexes.setdefault(text, len(indexes)))
            force_setattr(part, table, tuple(entries.values()))


def _values(graph: Graph, table: str) -> Iterator[tuple[tuple[str, int], str, Any]]:
    """Yield inputs and nodes that may have an index into a table, each with its path and the field that has it."""
    for kind, field in _USERS[table]:
        for index, value in enumerate(getattr(graph, kind)):
            yield (kind, index), field, value


def _with_bodies(graph: Graph, where: Place) -> Iterator[tuple[Graph, Place]]:
    yield graph, where
    for name, body in graph.subgraphs.items():
        yield from _with_bodies(body, where.at("subgraphs", name))
