"""What changed between two locks, how much it breaks, and which format version it makes.

`python schemas/tools/diff.py old.json new.json` prints the changes and the next version, with every reason. `--check`
compares the checked-in lock, and the lock of the last release, with the records of the code.

*Major*: documents of the version before do not mean the same, or are refused, without an upgrade step; readers of the
version before read no new bundle. *Minor*: they do; older readers read the new bundles that do not use what is new.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from catalogue import Union, spelled
from lock import LOCK, Entry, Lock, lock_of_records, read_lock, released_locks, version_of

Level = Literal["major", "minor", "note"]


@dataclass(frozen=True)
class Change:
    """A difference between two locks.

    Attributes:
        level: what it asks of the version; `note`: nothing.
        what: the change and why it is of that level, in one sentence.
    """

    level: Level
    what: str


def changes(old: Lock, new: Lock) -> list[Change]:
    """Return what changed from `old` to `new`, gravest first."""
    found = [*_convention(old, new), *_entries(old, new)]
    order = {"major": 0, "minor": 1, "note": 2}
    return sorted(found, key=lambda change: (order[change.level], change.what))


def next_version(old: Lock, found: list[Change]) -> tuple[int, int]:
    """Return the format version that `found` makes of `old`'s."""
    major, minor = version_of(old)
    if any(change.level == "major" for change in found):
        return major + 1, 0
    return (major, minor + 1) if any(change.level == "minor" for change in found) else (major, minor)


def _convention(old: Lock, new: Lock) -> Iterator[Change]:
    before, after = old["calling_convention"], new["calling_convention"]
    if before != after:
        yield Change("note", f"the calling convention is {after}, was {before}; its version is apart from the format's")


def _entries(old: Lock, new: Lock) -> Iterator[Change]:
    before = {(entry["kind"], entry["name"]): entry for entry in old["entries"]}
    after = {(entry["kind"], entry["name"]): entry for entry in new["entries"]}
    for key in sorted({**before, **after}):
        if key not in after:
            yield from _removed(before[key])
        elif key not in before:
            yield from _added(after[key], old)
        elif key[0] == "document":
            yield from _document(before[key], after[key])
        elif key[0] == "record":
            yield from _record(before[key], after[key])
        else:
            yield from _typed(before[key], after[key], old, new)


def _removed(entry: Entry) -> Iterator[Change]:
    # A named type is a way to write a union down; fields that change without it are reported themselves.
    if entry["kind"] != "type":
        yield Change("major", f"{_title(entry)} is gone: documents that have it are refused")


def _added(entry: Entry, old: Lock) -> Iterator[Change]:
    if entry["kind"] != "field":
        yield Change("minor" if entry["kind"] != "type" else "note", f"{_title(entry)} is new")
    elif entry["name"].partition(".")[0] not in {other["name"] for other in old["entries"]}:
        return  # of a new record, which is reported itself
    elif "default" in entry:
        yield Change("minor", f"{_title(entry)} is new, with a default: older readers refuse documents that set it")
    else:
        yield Change("major", f"{_title(entry)} is new and required: documents written before lack it")


def _document(old: Entry, new: Entry) -> Iterator[Change]:
    if old["record"] != new["record"]:
        yield Change("major", f"{_title(new)} holds `{new['record']}`, held `{old['record']}`")


def _record(old: Entry, new: Entry) -> Iterator[Change]:
    for key in ("tag_field", "tag"):
        if old.get(key) != new.get(key):
            yield Change("major", f"the {key} of {_title(new)} is {new.get(key)!r}, was {old.get(key)!r}")


def _typed(old: Entry, new: Entry, old_lock: Lock, new_lock: Lock) -> Iterator[Change]:
    title = _title(new)
    if not _includes(new["type"], old["type"], new_lock, old_lock):
        was, now = spelled(old["type"]), spelled(new["type"])
        yield Change("major", f"{title} takes `{now}`, took `{was}`: documents written before may not fit")
    elif not _includes(old["type"], new["type"], old_lock, new_lock):
        was, now = spelled(old["type"]), spelled(new["type"])
        yield Change("minor", f"{title} takes `{now}`, took `{was}`: older readers refuse what is new")
    missing = object()
    before, after = old.get("default", missing), new.get("default", missing)
    if json.dumps(before, default=str) == json.dumps(after, default=str):
        return
    if before is missing:
        yield Change("minor", f"{title} has a default: older readers refuse documents that leave it out")
    elif after is missing:
        yield Change("major", f"{title} is required: documents written before may leave it out")
    else:
        yield Change(
            "major",
            f"the default of {title} is {json.dumps(after)}, was {json.dumps(before)}: documents that leave it out "
            "change their meaning",
        )


def _includes(wide: Union, narrow: Union, wide_lock: Lock, narrow_lock: Lock) -> bool:
    """Return whether every value of union `narrow` is one of union `wide`."""
    return all(_is_covered(arm, wide, wide_lock, narrow_lock) for arm in narrow)


def _is_covered(arm: Any, wide: Union, wide_lock: Lock, narrow_lock: Lock) -> bool:
    candidates = [*wide, *_expanded(wide, wide_lock)]
    if any(_arm_includes(candidate, arm, wide_lock, narrow_lock) for candidate in candidates):
        return True
    arms = _expanded([arm], narrow_lock)
    return arms != [arm] and _includes(wide, arms, wide_lock, narrow_lock)


def _arm_includes(wide: Any, narrow: Any, wide_lock: Lock, narrow_lock: Lock) -> bool:
    if wide == narrow:
        return True  # a change inside of a record or named type is reported there
    if isinstance(wide, dict) and isinstance(narrow, dict) and wide.keys() == narrow.keys():
        return all(_includes(wide[key], narrow[key], wide_lock, narrow_lock) for key in wide)
    return False


def _expanded(union: Union, lock: Lock) -> Union:
    named = {entry["name"]: entry["type"] for entry in lock["entries"] if entry["kind"] == "type"}
    arms: Union = []
    for arm in union:
        arms += _expanded(named[arm], lock) if isinstance(arm, str) and arm in named else [arm]
    return arms


def _title(entry: Entry) -> str:
    return f"{entry['kind']} `{entry['name']}`"


def report(old: Lock, found: list[Change]) -> list[str]:
    """Return one line per change, and the version that they make."""
    major, minor = next_version(old, found)
    return [f"  {change.level}: {change.what}" for change in found] + [f"next version: {major}.{minor}"]


def check(locked: Lock | None, released: Lock | None, current: Lock) -> list[str]:
    """Return what is wrong, line by line; empty when nothing is.

    Args:
        locked: the checked-in lock.
        released: the lock of the last released format; None: there was no release.
        current: the lock of the records as they are.
    """
    if released is not None:
        found = changes(released, current)
        needed = next_version(released, found)
        if version_of(current) < needed:
            head = f"format {released['format']} is released, and the records changed:"
            tail = f"FORMAT_VERSION is {current['format']}: raise it, and write `FEATURES` to go with it"
            return [head, *report(released, found), tail]
    if locked is None:
        return ["there is no schemas/v1/lock.json; run `python schemas/tools/lock.py --write`"]
    if locked == current:
        return []
    head = "schemas/v1/lock.json differs from the records:"
    tail = "run `python schemas/tools/lock.py --write` and `generate.py`, and say in schemas/CHANGELOG.md what changed"
    found = changes(locked, current)
    return [head, *(report(locked, found) if found else ["  the lock is written otherwise"]), tail]


def main(argv: list[str] | None = None) -> int:
    """Print or check the changes; return the exit code: 1 when `--check` finds any."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="compare the checked-in lock with the code")
    parser.add_argument("locks", nargs="*", type=Path, help="old and new lock; default: last release, the code's")
    options = parser.parse_args(argv)
    if options.check:
        locked = read_lock(LOCK)
        wrong = check(locked, (released_locks() or [None])[-1], lock_of_records(locked))
        print("\n".join(wrong), file=sys.stderr, end="\n" * bool(wrong))
        return 1 if wrong else 0
    if len(options.locks) not in (0, 2):
        parser.error("give two locks, or none")
    old = read_lock(options.locks[0]) if options.locks else (released_locks() or [read_lock(LOCK)])[-1]
    if old is None:
        parser.error("there is no lock to compare with")
    new = read_lock(options.locks[1]) if options.locks else lock_of_records(old)
    if new is None:
        parser.error(f"there is no file {options.locks[1]}")
    print("\n".join(report(old, changes(old, new))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
