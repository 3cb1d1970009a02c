"""The tables of `schemas/README.md`, from the records: a block per record and per named type, between markers.

`<!-- record: StateTensor -->` or `<!-- type: DType -->` begins a block, `<!-- end -->` ends it; what is between them is
written by `generate.py`.
"""

from __future__ import annotations

import json
import re
from typing import Any

from catalogue import NAMED_TYPES, attribute_docs, records, spelled, summary_of, union_of
from lock import Entry, Lock

_BLOCK = re.compile(r"<!-- (record|type): (\w+) -->\n.*?<!-- end -->", re.DOTALL)


def filled(text: str, lock: Lock) -> str:
    """Return `text` with the content of every block written anew.

    Args:
        text: the prose.
        lock: the lock of the records.

    Raises:
        SystemExit: a record or named type has no block, or more than one.
    """
    wanted = sorted([("record", record.__name__) for record in records()] + [("type", name) for name in NAMED_TYPES])
    found = sorted((match[1], match[2]) for match in _BLOCK.finditer(text))
    if found != wanted:
        wrong = sorted({*found} ^ {*wanted}) or [block for block in found if found.count(block) > 1]
        raise SystemExit(f"schemas/README.md has no block, or two, for: {', '.join(name for _, name in wrong)}")
    return _BLOCK.sub(lambda match: _block(match[1], match[2], lock), text)


def _block(kind: str, name: str, lock: Lock) -> str:
    body = _record_block(name, lock) if kind == "record" else _type_block(name)
    return f"<!-- {kind}: {name} -->\n{body}\n<!-- end -->"


def _record_block(name: str, lock: Lock) -> str:
    record = next(record for record in records() if record.__name__ == name)
    entries = {entry["name"]: entry for entry in lock["entries"] if entry["kind"] in ("record", "field")}
    docs = attribute_docs(record)
    tag = entries[name].get("tag")
    tagged = f' Tagged `"{entries[name]["tag_field"]}": "{tag}"`.' if tag is not None else ""
    lines = [f"#### `{name}`", "", f"{summary_of(record)}{tagged} Since {entries[name]['since']}.", ""]
    if record.__struct_fields__:
        lines += ["| field | type | default | since | meaning |", "|---|---|---|---|---|"]
    for field in record.__struct_fields__:
        lines.append(_row(field, entries[f"{name}.{field}"], docs[field]))
    return "\n".join(lines).rstrip()


def _row(field: str, entry: Entry, meaning: str) -> str:
    default = f"`{json.dumps(entry['default'])}`" if "default" in entry else "required"
    cells = [f"`{field}`", _type(entry["type"]), default, entry["since"], meaning.replace("|", "\\|")]
    return f"| {' | '.join(cells)} |"


def _type(union: list[Any]) -> str:
    return spelled(union).replace(" | ", " or ").replace("<", "&lt;")


def _type_block(name: str) -> str:
    type_, description = NAMED_TYPES[name]
    arms = (
        spelled(union_of(type_, within=name)).split(" | ")
        if name != "Argument"
        else [spelled(union_of(type_, within=name))]
    )
    return f"#### `{name}`\n\n{description} One of: {', '.join(f'`{arm}`' for arm in arms)}."
