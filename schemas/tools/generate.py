"""Write what follows from the records: `python schemas/tools/generate.py`, or `--check` whether it is current.

`schemas/v1/<document>.schema.json` describes each kind of JSON file of a bundle (JSON Schema 2020-12). What the schemas
cannot say (an integer is written without fraction or exponent, a float with one; indices are in range; ...) is in the
prose of `schemas/README.md`. `schemas/fields.md` lists every record and field, `schemas/codes.md` every check,
as `schemas/v1/checks.json`, where rules of checks that no field declares are written; `schemas/v1/operators.json` all
operators.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
import types
import typing
from pathlib import Path
from typing import Annotated, Any

import msgspec
import operator_table
from catalogue import DOCUMENTS, NAMED_TYPES, attribute_docs, records, summary_of
from checks import table, text_of
from lock import LOCK, lock_of_records, read_lock
from reference import codes_page, fields_page

from aotexport_runtime.schema.bounded import Bounds
from aotexport_runtime.schema.versions import FORMAT_VERSION

SCHEMAS = Path(__file__).parents[1]
DIALECT = "https://json-schema.org/draft/2020-12/schema"
ID = "urn:aotexport:format:{major}:{name}"
REFERENCE = "#/$defs/{name}"


def generate() -> dict[str, str]:
    """Return the text of each generated file, by its path below `schemas`."""
    texts = {f"v1/{name}.schema.json": _text(_schema(name, record)) for name, record in DOCUMENTS.items()}
    pages = {"fields.md": fields_page(lock_of_records(read_lock(LOCK))), "codes.md": codes_page(table())}
    data = {"v1/checks.json": text_of(table()), "v1/operators.json": operator_table.text_of(operator_table.table())}
    return {**texts, **data, **pages}


def _schema(name: str, record: type[Any]) -> dict[str, Any]:
    _, components = msgspec.json.schema_components((record,), ref_template=REFERENCE)
    docs = {record.__name__: record for record in records()}
    definitions: dict[str, Any] = {}
    for each, component in components.items():
        definitions[each] = _named(_described(docs[each], component))
    used = {each for each in NAMED_TYPES if _mentions(definitions, each)}
    while True:
        definitions.update({each: _named_type(each) for each in used})
        more = {each for each in NAMED_TYPES if _mentions(definitions, each)} - used
        if not more:
            break
        used |= more
    root = definitions.pop(record.__name__)
    if _mentions({"": root, **definitions}, record.__name__):
        definitions[record.__name__] = root
        root = {"$ref": REFERENCE.format(name=record.__name__), "title": root["title"]}
    return {"$schema": DIALECT, "$id": ID.format(major=FORMAT_VERSION[0], name=name), **root, "$defs": definitions}


def _described(record: type[Any], component: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of a record with the docstring's words on the record and on each field."""
    docs = attribute_docs(record)
    hints = typing.get_type_hints(record, include_extras=True)
    properties = {
        field: {**_bounded(schema, hints[field]), "description": docs[field]} if field in docs else schema
        for field, schema in component["properties"].items()
    }
    return {**component, "description": summary_of(record), "properties": properties}


def _bounded(schema: dict[str, Any], hint: Any) -> dict[str, Any]:
    """Return the schema of a type with the bounds that the type's parts are annotated with."""
    arguments = typing.get_args(hint)
    if typing.get_origin(hint) is Annotated:
        bounds = (rule.keywords for rule in arguments[1:] if isinstance(rule, Bounds))
        return _bounded({**schema, **next(bounds, {})}, arguments[0])
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        arms = [arm for arm in arguments if typing.get_origin(arm) is Annotated]
        for arm in arms:
            kind = {int: "integer", str: "string"}.get(typing.get_args(arm)[0], "")
            arm_schemas = [_bounded(each, arm) if each.get("type") == kind else each for each in schema["anyOf"]]
            schema = {**schema, "anyOf": arm_schemas}
        return schema
    if typing.get_origin(hint) is dict:
        names = _bounded({}, arguments[0])
        return {**schema, "propertyNames": {"type": "string", **names}} if names else schema
    if typing.get_origin(hint) in (tuple, list) and isinstance(schema.get("items"), dict):
        return {**schema, "items": _bounded(schema["items"], arguments[0])}
    return schema


def _named(schema: Any, *, within: str = "") -> Any:
    """Return `schema` with named types in place of their arms, and without OpenAPI's discriminators."""
    if isinstance(schema, list):
        return [_named(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    plain = {key: _named(value) for key, value in schema.items() if key not in ("discriminator", "anyOf")}
    if "anyOf" in schema:
        arms = _arms(schema)
        for name in NAMED_TYPES:
            covered = _arms_of(name)
            if name != within and len(covered) > 1 and all(arm in arms for arm in covered):
                arms = [{"$ref": REFERENCE.format(name=name)}] + [arm for arm in arms if arm not in covered]
        arms = [_named(arm) for arm in arms]
        return {**plain, **(arms[0] if len(arms) == 1 else {"anyOf": arms})}
    for name in NAMED_TYPES:
        if name != within and "enum" in schema and [{"enum": schema["enum"]}] == _arms_of(name):
            del plain["enum"]
            return {**plain, "$ref": REFERENCE.format(name=name)}
    return plain


def _arms(schema: dict[str, Any]) -> list[Any]:
    """Return the arms of a union, nested unions flattened."""
    if "anyOf" not in schema:
        return [{key: value for key, value in schema.items() if key != "discriminator"}]
    return [arm for nested in schema["anyOf"] for arm in _arms(nested)]


@functools.cache
def _arms_of(name: str) -> list[Any]:
    (schema,), _ = msgspec.json.schema_components((NAMED_TYPES[name][0],), ref_template=REFERENCE)
    return _arms(schema)


def _named_type(name: str) -> dict[str, Any]:
    arms = _arms_of(name)
    schema = arms[0] if len(arms) == 1 else {"anyOf": arms}
    return {"title": name, "description": NAMED_TYPES[name][1], **_named(schema, within=name)}


def _mentions(schema: Any, name: str) -> bool:
    return f'"{REFERENCE.format(name=name)}"' in json.dumps(schema)


def _text(schema: dict[str, Any]) -> str:
    return json.dumps(schema, indent=2, sort_keys=True, ensure_ascii=False) + "\n"


def main(argv: list[str] | None = None) -> int:
    """Write the files, or check them; return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing; fail when a file is not current")
    options = parser.parse_args(argv)
    texts = generate()
    if not options.check:
        for name, text in texts.items():
            (SCHEMAS / name).write_text(text, encoding="utf-8")
        return 0
    files = [
        *SCHEMAS.glob("v1/*.schema.json"),
        *(SCHEMAS / name for name in ("v1/checks.json", "v1/operators.json", "fields.md", "codes.md")),
    ]
    current = {
        path.relative_to(SCHEMAS).as_posix(): path.read_text(encoding="utf-8") for path in files if path.exists()
    }
    stale = [name for name, text in texts.items() if current.get(name) != text] + sorted({*current} - {*texts})
    for name in stale:
        print(f"schemas/{name} differs from the records; run `python schemas/tools/generate.py`", file=sys.stderr)
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
