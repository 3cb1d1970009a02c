"""Negatives of the checks that fields declare: adds those that `refused/cases.json` lacks.

`PYTHONPATH=schemas/tools python -m tests.golden.negatives`, then `schemas/tools/generate.py`.
For each such check it looks for a golden with the field, and a value that is refused by this check alone.
"""

import json
import tempfile
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import msgspec
from catalogue import DOCUMENTS
from checks import FILES

from aotexport_runtime.bundle.check import faults_of
from aotexport_runtime.schema.bounded import Record
from tests.golden.refuse import CASES, HERE, edited_bundle

TABLE = json.loads((HERE.parents[1] / "schemas/v1/checks.json").read_text(encoding="utf-8"))
Found = tuple[str, tuple[str | int, ...], Any]
"""A file, the path of a field in it, and its value, plain."""

NUMBERS = (-1, 0, 1, 2, 3, 4, 5, 10**7, 1 << 63, -(1 << 63))
TEXTS = ("", "no name", "none", "other", "line\nbreak")
MOST_TRIES = 150


def candidates(value: Any) -> Iterator[Any]:
    """Yield values to put in the place of `value`."""
    scalars = [*NUMBERS, *TEXTS, -1.0]
    if isinstance(value, list):
        yield from ([*value, value[-1]], value[:-1]) if value else ()
        yield from ([scalar] for scalar in scalars)
        yield from ([0, 0], ["a", "a"])
    elif isinstance(value, dict):
        yield from ({**value, text: next(iter(value.values()), 0.0)} for text in TEXTS)
        yield from (dict.fromkeys(value, scalar) for scalar in scalars)
    else:
        yield from scalars


def fields_in(
    value: Any, record: Record | Any, steps: tuple[str | int, ...]
) -> Iterator[tuple[str, tuple[str | int, ...], Any]]:
    """Yield name, path and value of every field in a decoded value, as `Record.field`."""
    if isinstance(record, msgspec.Struct) and isinstance(value, dict):
        for field in record.__struct_fields__:
            item = getattr(record, field)
            yield (
                f"{type(record).__name__}.{field}",
                (*steps, field),
                value.get(field, json.loads(msgspec.json.encode(item))),
            )
            if field in value:
                yield from fields_in(value[field], item, (*steps, field))
    elif isinstance(record, tuple | list) and isinstance(value, list):
        for index, item in enumerate(record):
            yield from fields_in(value[index], item, (*steps, index))
    elif isinstance(record, dict) and isinstance(value, dict):
        for key, item in record.items():
            yield from fields_in(value[key], item, (*steps, key))


def places() -> dict[str, list[tuple[str, Found]]]:
    """Return every field of the goldens, by name, with the golden that has it; small goldens first."""
    found: dict[str, list[tuple[str, Found]]] = {}
    for golden in sorted(HERE.glob("v1.*/*"), key=lambda path: sum(f.stat().st_size for f in path.rglob("*.json"))):
        for path in sorted((golden / "bundle").rglob("*.json")):
            file = path.relative_to(golden / "bundle").as_posix()
            document = next(name for pattern, name in FILES.items() if fnmatch(file, pattern))
            plain = json.loads(path.read_text(encoding="utf-8"))
            record = msgspec.json.decode(path.read_bytes(), type=DOCUMENTS[document])
            for name, steps, value in fields_in(plain, record, ()):
                found.setdefault(name, []).append((golden.name, (file, steps, value)))
    return found


def negative(check: str, found: list[tuple[str, Found]]) -> dict[str, Any] | None:
    """Return an edit of a golden that `check` refuses, and nothing else; None: none was found."""
    tries = 0
    for golden, (file, steps, value) in _varied(found):
        for candidate in candidates(value):
            if (tries := tries + 1) > MOST_TRIES:
                return None
            case: dict[str, Any] = {"golden": golden, "edits": [{"file": file, "at": list(steps), "set": candidate}]}
            with tempfile.TemporaryDirectory() as folder:
                faults = faults_of(edited_bundle(case, Path(folder) / "bundle"))
            if [fault.check for fault in faults] == [check]:
                return {
                    **case,
                    "check": check,
                    "code": faults[0].code,
                    "where": faults[0].where,
                    "path": faults[0].path,
                }
    return None


def _varied(found: list[tuple[str, Found]]) -> list[tuple[str, Found]]:
    """Return those first that differ in golden or value: many are alike."""
    first = {(golden, repr(value)): (golden, (file, steps, value)) for golden, (file, steps, value) in reversed(found)}
    return [*reversed(first.values())]


def main() -> None:
    """Write the negatives that are missing, and say which were not found."""
    cases, known = dict(CASES), places()
    for row in TABLE["checks"]:
        if row.get("declared") and not row["negatives"]:
            case = negative(row["check"], known.get(row["field"], []))
            print(row["check"], "no negative was found" if case is None else case["edits"], flush=True)
            if case is not None:
                cases[row["check"].replace("/", " ")] = case
    text = json.dumps(cases, indent=1) + "\n"
    (HERE / "refused/cases.json").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
