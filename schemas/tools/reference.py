"""The pages that are generated: `schemas/fields.md` from the records, `schemas/codes.md` from the checks."""

from __future__ import annotations

import json
import typing
from typing import Any

from catalogue import (
    BOUNDED,
    CHAPTERS,
    NAMED_TYPES,
    attribute_docs,
    by_module,
    hints,
    references_of,
    spelled,
    summary_of,
    union_of,
)
from checks import codes
from lock import Entry, Lock

from aotexport_runtime.schema.bounded import Record

FIELDS_HEAD = """\
# Records and fields

Every record of the [bundle format](README.md), written by `schemas/tools/generate.py`. A field without a default is
required. What is newer than format 1.0 says so. A record that is *tagged* has the field `kind` with that value as well.
What a value refers to stands in italics at the end; `Plain` is the program with each tensor subclass taken apart.
"""

CODES_HEAD = """\
# What a reader refuses

The codes of the [bundle format](README.md#14-what-a-reader-refuses), and the checks that have them, written by
`schemas/tools/generate.py` from [`v1/checks.json`](v1/checks.json). A check refuses what its rule is not true of. Those
of fields alone are named by them, others have a name of their own. Types are those of [fields.md](fields.md).
"""


def fields_page(lock: Lock) -> str:
    """Return the page of the records, by chapters, and of the types that several fields share."""
    entries = {entry["name"]: entry for entry in lock["entries"] if entry["kind"] in ("record", "field")}
    parts = [FIELDS_HEAD]
    for module, found in by_module().items():
        parts += [f"## {CHAPTERS[module]}\n", *(_record(record, entries) for record in found)]
    rows = [f"| `{name}` | {NAMED_TYPES[name][1]} | {_arms(name)} |" for name in sorted(NAMED_TYPES)]
    parts.append("\n".join(["## Types that fields share\n", "| type | is | one of |", "|---|---|---|", *rows]) + "\n")
    rows = [_bounds(name, type_) for type_, name in BOUNDED.items()]
    head = ["## Numbers and text with bounds\n", "| type | is | bounds | code |", "|---|---|---|---|"]
    parts.append("\n".join([*head, *rows]) + "\n")
    return "\n".join(parts)


def codes_page(content: dict[str, Any]) -> str:
    """Return the page of the codes of refusals, and of the checks that have them; of the content of `checks.json`."""
    parts, causes = [CODES_HEAD], codes()
    for code, meaning in content["codes"].items():
        rules: dict[str, list[str]] = {}
        for row in content["checks"]:
            if row["code"] == code:
                name, field = f"`{row['check'].partition('/')[2]}`", f" of `{row['field']}`" if row["field"] else ""
                rules.setdefault(row["rule"], []).append(name if row.get("declared") else name + field)
        lines = [f"- {', '.join(names)}: {rule}" for rule, names in sorted(rules.items(), key=lambda item: item[1])]
        told = f"{meaning} *Cause:* {causes[code]['cause']} *Way out:* {causes[code]['way_out']}"
        parts += [f"## `{code}`\n", f"{told}\n", "\n".join(lines) + "\n"]
    return "\n".join(parts)


def _record(record: type[Record], entries: dict[str, Entry]) -> str:
    name, docs = record.__name__, attribute_docs(record)
    tag = entries[name].get("tag")
    tagged = f' Tagged `"{tag}"`.' if tag is not None else ""
    lines = [f"### {name}", "", f"{summary_of(record)}{tagged}{_since(entries[name], ' Since {}.')}", ""]
    if record.__struct_fields__:
        lines += ["| field | type | default | meaning |", "|---|---|---|---|"]
        types = hints(record, bounds=True)
        lines += [_row(each, types[each], entries[f"{name}.{each}"], docs.get(each, "")) for each in types] + [""]
    return "\n".join(lines)


def _row(field: str, hint: Any, entry: Entry, meaning: str) -> str:
    default = f"`{json.dumps(entry['default'])}`" if "default" in entry else ""
    type_ = _type(union_of(hint))
    said = references_of(hint)
    meaning += f" *{'; '.join(said)}*" if said else ""
    cells = [f"`{field}`", type_, default, _since(entry, "Since {}: ") + meaning.replace("|", "\\|")]
    return f"| {' | '.join(cells)} |"


def _since(entry: Entry, text: str) -> str:
    return "" if entry["since"] == "1.0" else text.format(entry["since"])


def _type(union: list[Any]) -> str:
    return spelled(union).replace(" | ", " or ").replace("<", "&lt;")


def _bounds(name: str, hint: Any) -> str:
    inner, bounds = typing.get_args(hint)
    texts = [f"{keyword} `{value}`".replace("|", "\\|") for keyword, value in bounds.keywords.items()]
    return f"| `{name}` | {_type(union_of(inner))} | {', '.join(texts)} | `{bounds.code}` |"


def _arms(name: str) -> str:
    union = spelled(union_of(NAMED_TYPES[name][0], within=name))
    return ", ".join(f"`{arm}`" for arm in ([union] if name == "Argument" else union.split(" | "))).replace("|", "\\|")
