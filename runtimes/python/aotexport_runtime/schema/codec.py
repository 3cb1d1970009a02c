"""Records to canonical JSON bytes and back, strictly.

The same record always gives the same bytes: sorted keys, no timestamps, no absolute paths. Non-finite floats
never reach JSON (`FloatArgument`), since msgspec would write them as null.
"""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

from aotexport_runtime.errors import BundleInvalid
from aotexport_runtime.schema.base import Record
from aotexport_runtime.schema.versions import FORMAT_VERSION, Version, pending

T = TypeVar("T", bound=Record)

MAX_JSON_NBYTES = 1 << 30
MAX_DEPTH = 64
MAX_CONTAINERS = 1 << 23
"""Lists and objects of a file. A node of a graph has 8 to 16; decoded, each takes some 64 bytes."""
MAX_MESSAGE = 300


def encode_record(record: Record, *, indent: bool = True) -> bytes:
    """Return the canonical JSON of `record`, ending in a newline."""
    # Defaults are left out by identity, which decoding gives to all that equal them.
    read = msgspec.json.decode(msgspec.json.encode(record), type=type(record))
    data = msgspec.json.encode(read, order="sorted")
    return (msgspec.json.format(data, indent=2) if indent else data) + b"\n"


def decode_record(data: bytes, type_: type[T], *, where: str, written: Version = FORMAT_VERSION) -> T:
    """Return the record that `data` holds.

    Args:
        data: JSON bytes.
        type_: the record's type.
        where: file name, for errors.
        written: format version of the bundle; an older document is upgraded first.

    Raises:
        BundleInvalid: not JSON, nested too deep, a key twice in one object, or not such a record, with the JSON path.
    """
    check_depth(data, where)
    try:
        steps = pending(type_.__name__, written)
        record = None if steps else msgspec.json.decode(data, type=type_)
        plain = msgspec.json.decode(data)
        if count_keys(msgspec.json.encode(plain)) != count_keys(data):
            raise BundleInvalid("an object has the same key twice", where=where)
        if record is not None:
            return record
        document: dict[str, Any] = plain
        for step in steps:
            document = step(document)
        return msgspec.convert(document, type=type_)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BundleInvalid(str(error)[:MAX_MESSAGE], where=where) from None


def check_depth(data: bytes, where: str) -> None:
    """Refuse JSON that is larger, nested deeper, or of more lists and objects than any bundle needs.

    Raises:
        BundleInvalid: see above.
    """
    if len(data) > MAX_JSON_NBYTES:
        raise BundleInvalid(f"{len(data)} bytes of JSON; at most {MAX_JSON_NBYTES} are read", where=where)
    depth, containers = nesting(data)
    if depth > MAX_DEPTH:
        raise BundleInvalid(f"nested deeper than {MAX_DEPTH} levels", where=where)
    if containers > MAX_CONTAINERS:
        raise BundleInvalid(f"{containers} lists and objects; at most {MAX_CONTAINERS} are read", where=where)


def count_keys(data: bytes) -> int:
    """Return how many keys the objects of `data` have together; `data` is JSON."""
    import numpy as np

    # What is left is quotes and colons, without escaped ones: a colon behind an even number of quotes ends a key.
    data = data.replace(b"\\\\", b"").replace(b'\\"', b"").translate(None, _NO_KEYS)
    codes = np.frombuffer(data, dtype=np.uint8)
    odd = np.cumsum(codes == ord('"'), dtype=np.uint8) & 1
    return int(np.count_nonzero((codes == ord(":")) & (odd == 0)))


def nesting(data: bytes) -> tuple[int, int]:
    """Return the deepest nesting of brackets in `data`, and how many are opened, not counting those in strings.

    Exact for JSON; for other bytes, exact up to the first byte that every decoder refuses.
    """
    import numpy as np

    # Escapes go first, then all but brackets and quotes, then pairs of quotes: the parity of the others stays.
    data = data.replace(b"\\\\", b"").replace(b'\\"', b"").translate(None, _PLAIN).replace(b'""', b"")
    depth = deepest = opened = quotes = 0
    for start in range(0, len(data), _CHUNK_NBYTES):
        codes = np.frombuffer(data, dtype=np.uint8, count=min(_CHUNK_NBYTES, len(data) - start), offset=start)
        seen = np.cumsum(codes == ord('"'), dtype=np.int32) + quotes
        opening = (codes == ord("[")) | (codes == ord("{"))
        closing = (codes == ord("]")) | (codes == ord("}"))
        outside = seen % 2 == 0
        steps = (opening.astype(np.int8) - closing.astype(np.int8)) * outside
        opened += int(np.count_nonzero(opening & outside))
        running = np.cumsum(steps, dtype=np.int32) + depth
        deepest = max(deepest, int(running.max()))
        depth, quotes = int(running[-1]), int(seen[-1]) % 2
    return deepest, opened


_CHUNK_NBYTES = 1 << 20
_NO_KEYS = bytes(set(range(256)) - set(b'":'))
_PLAIN = bytes(set(range(256)) - set(b'[]{}"'))
