"""The lock: a flat list of every document, record, field and named type, `schemas/v1/lock.json`.

`python schemas/tools/lock.py` prints the lock of the records as they are; `--write` puts it in its place; `--release`
copies it to `schemas/v1/released/<version>.json`. From then on `diff.py --check` holds the records against it.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import msgspec
from catalogue import DOCUMENTS, NAMED_TYPES, default_of, hints, records, union_of

from aotexport_runtime.schema.versions import CALLING_CONVENTION, FORMAT_VERSION, format_version

LOCK = Path(__file__).parents[1] / "v1/lock.json"
RELEASED = LOCK.parent / "released"

Entry = dict[str, Any]
Lock = dict[str, Any]


def lock_of_records(before: Lock | None = None) -> Lock:
    """Return the lock of the records as they are.

    Args:
        before: an earlier lock, which says since which version its entries are there; None: all are new.
    """
    entries = [*_documents(), *_records(), *_named_types()]
    since = {(entry["kind"], entry["name"]): entry["since"] for entry in (before or {}).get("entries", [])}
    current = format_version(FORMAT_VERSION)
    for entry in entries:
        entry["since"] = since.get((entry["kind"], entry["name"]), current)
    return {"format": current, "calling_convention": CALLING_CONVENTION, "entries": entries}


def _documents() -> list[Entry]:
    return [{"kind": "document", "name": name, "record": record.__name__} for name, record in sorted(DOCUMENTS.items())]


def _records() -> list[Entry]:
    entries: list[Entry] = []
    for record in records():
        config = record.__struct_config__
        tag = {} if config.tag is None else {"tag_field": config.tag_field, "tag": config.tag}
        entries.append({"kind": "record", "name": record.__name__, **tag})
        types = hints(record)
        for field in msgspec.structs.fields(record):
            entry = {
                "kind": "field",
                "name": f"{record.__name__}.{field.encode_name}",
                "type": union_of(types[field.name]),
            }
            if not field.required:
                entry["default"] = default_of(field)
            entries.append(entry)
    return entries


def _named_types() -> list[Entry]:
    return [
        {"kind": "type", "name": name, "type": union_of(type_, within=name)}
        for name, (type_, _) in sorted(NAMED_TYPES.items())
    ]


def text_of(lock: Lock) -> str:
    """Return the lock as JSON, one line per entry."""
    entries = ",\n".join("    " + json.dumps(entry) for entry in lock["entries"])
    head = f'  "format": {json.dumps(lock["format"])},\n  "calling_convention": {lock["calling_convention"]},\n'
    return f'{{\n{head}  "entries": [\n{entries}\n  ]\n}}\n'


def read_lock(path: Path) -> Lock | None:
    """Return the lock in file `path`, or None when there is no such file."""
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None


def released_locks() -> list[Lock]:
    """Return the locks of the released formats, oldest first."""
    locks = [json.loads(path.read_text(encoding="utf-8")) for path in RELEASED.glob("*.json")]
    return sorted(locks, key=lambda lock: version_of(lock))


def version_of(lock: Lock) -> tuple[int, int]:
    """Return `(major, minor)` of a lock."""
    major, minor = lock["format"].split(".")
    return int(major), int(minor)


def main(argv: list[str] | None = None) -> int:
    """Print, write or release the lock; return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    action = parser.add_mutually_exclusive_group()
    action.add_argument("--write", action="store_true", help="write schemas/v1/lock.json")
    action.add_argument(
        "--release", action="store_true", help="freeze the format: copy the lock to schemas/v1/released"
    )
    options = parser.parse_args(argv)
    text = text_of(lock_of_records(read_lock(LOCK)))
    if options.release:
        return _release(text)
    if options.write:
        LOCK.write_text(text, encoding="utf-8")
    else:
        print(text, end="")
    return 0


def _release(text: str) -> int:
    path = RELEASED / f"{format_version(FORMAT_VERSION)}.json"
    if path.exists():
        print(f"format {path.stem} is released already: {path.name} stays as it is", file=sys.stderr)
        return 1
    if not LOCK.is_file() or LOCK.read_text(encoding="utf-8") != text:
        print("schemas/v1/lock.json is not current; run `python schemas/tools/lock.py --write` first", file=sys.stderr)
        return 1
    RELEASED.mkdir(exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
