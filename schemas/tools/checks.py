"""The checks of a bundle as data: `schemas/v1/checks.json`, a row a check.

Names and rules of checks that fields declare are made from the records; rules of all others are written in the file.
Code, place and negatives of all are made: the code is what the name begins with, negatives are the bundles of
`tests/golden/refused` that the check refuses, places the fields that these refusals lead to.
"""

from __future__ import annotations

import fnmatch
import functools
import json
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

from catalogue import BOUNDED, DOCUMENTS, records, references_of

from aotexport_runtime import schema
from aotexport_runtime.schema.bounded import AtMost, Bounds, IndexOf, Over, Record
from aotexport_runtime.validate.declared import declared_rules, is_walked

CHECKS = Path(__file__).parents[1] / "v1/checks.json"
CASES = Path(__file__).parents[2] / "tests/golden/refused/cases.json"
CODES = Path(str(schema.__file__)).with_name("codes.json")
FILES = {
    "bundle.json": "bundle",
    "programs/*/program*.json": "program",
    "testvectors/*.json": "vector",
    "targets/*/target.json": "target",
    "targets/*/kernels/kernels.json": "kernels",
    "targets/*/lowered.json": "lowered",
    "*.json": "graph",
}
"""Documents by the places of their files, the first that fits."""

Row = dict[str, Any]


@functools.cache
def table() -> dict[str, Any]:
    """Return what the file must hold: a sentence per code, and the rows by name."""
    written = json.loads(CHECKS.read_text(encoding="utf-8"))
    said = {row["check"]: (row["field"], row["rule"]) for row in written["checks"] if not row.get("declared")}
    cases = json.loads(CASES.read_text(encoding="utf-8"))
    meanings = {code: told["means"] for code, told in codes().items()}
    rows = [_row(name, *said[name], cases) for name in said]
    rows += [{**_row(name, field, rule, cases), "declared": True} for name, (field, rule) in declared().items()]
    return {"codes": meanings, "checks": sorted(rows, key=lambda row: row["check"])}


def codes() -> dict[str, dict[str, str]]:
    """Return meaning, cause and way out of each code, which the runtime tells too."""
    return json.loads(CODES.read_text(encoding="utf-8"))


def text_of(content: dict[str, Any]) -> str:
    """Return the text of the file: a line per code and per row."""
    codes = ",\n".join(f"  {json.dumps(code)}: {json.dumps(said)}" for code, said in content["codes"].items())
    rows = ",\n".join(f"  {json.dumps(row, ensure_ascii=False)}" for row in content["checks"])
    return f'{{\n "codes": {{\n{codes}\n }},\n "checks": [\n{rows}\n ]\n}}\n'


def _row(name: str, field: str, rule: str, cases: dict[str, Any]) -> Row:
    fired = {each: case for each, case in cases.items() if case["check"] == name}
    places = sorted({place_of(case["where"], case["path"]) for case in fired.values()})
    code = name.partition("/")[0]
    return {"check": name, "code": code, "field": field, "rule": rule, "places": places, "negatives": sorted(fired)}


def declared() -> dict[str, tuple[str, str]]:
    """Return field and rule of each check that a field declares, by name."""
    found: dict[str, list[str]] = {}
    for record in filter(is_walked, records()):
        hints = typing.get_type_hints(record, include_extras=True)
        for field in record.__struct_fields__:
            for rule, type_ in _rules(hints[field]):
                found.setdefault(f"{rule.code}/{record.__name__}.{field}", []).append(_sentence(rule, type_))
    return {name: (name.partition("/")[2], " ".join(rules)) for name, rules in found.items()}


def _rules(hint: Any) -> Iterator[tuple[Any, Any]]:
    """Yield what a type declares, with the annotated type; sizes and trees have checks of their own."""
    arguments = typing.get_args(hint)
    if typing.get_origin(hint) is Annotated:
        for rule in declared_rules(arguments[1:]):
            if not isinstance(rule, Over) and not (isinstance(rule, IndexOf) and arguments[0] is not int):
                yield rule, hint
        if any(isinstance(rule, Bounds) and rule.apart for rule in arguments[1:]):
            return
        arguments = arguments[:1]
    for argument in arguments:
        yield from _rules(argument)


def _sentence(rule: Any, type_: Any) -> str:
    if isinstance(rule, AtMost):
        return f"At most {rule.most}, a bound of this reader."
    if isinstance(rule, Bounds):
        if rule.minItems is not None:
            return f"At least {rule.minItems} item."
        bounds = next(each for each in type_.__metadata__ if type(each) is Bounds)
        plain = Annotated[typing.get_args(type_)[0], bounds]  # pyrefly: ignore[invalid-annotation]
        return f"A `{BOUNDED[plain]}`."
    said = references_of(Annotated[typing.get_args(type_)[0], rule])[0]  # pyrefly: ignore[invalid-annotation]
    return f"{said[0].upper()}{said[1:]}."


@functools.cache
def place_of(where: str, path: str) -> str:
    """Return which field a path in a file leads to: `Graph.nodes[]`; `file`: of no record; `bundle`: of no file."""
    if not where:
        return "bundle"
    document = next((name for pattern, name in FILES.items() if fnmatch.fnmatch(where, pattern)), None)
    if document is None:
        return "file"
    hint: Any = DOCUMENTS[document]
    place = hint.__name__
    for step in steps_of(path):
        owner = next((each for each in _records_at(hint) if step in each.__struct_fields__), None)
        if owner is not None:
            hint = typing.get_type_hints(owner)[str(step)]
            place = f"{owner.__name__}.{step}"
        else:
            items = [
                each
                for each in _arms(hint)
                if typing.get_origin(each) in ((dict,) if isinstance(step, str) else (list, tuple))
            ]
            hint = typing.get_args(items[0])[-1 if isinstance(step, str) else 0] if items else None
            place += "{}" if isinstance(step, str) else "[]"
    return place


def steps_of(path: str) -> list[str | int]:
    """Return keys and indices of a JSON path (14.2)."""
    import re

    found = re.findall(r"\.(\w+)|\[(\d+)\]|\['((?:[^'\\]|\\.)*)'\]", path)
    return [int(index) if index else name or key for name, index, key in found]


def _arms(hint: Any) -> list[Any]:
    origin = typing.get_origin(hint)
    if origin is None or origin in (list, tuple, dict):
        return [hint]
    return [arm for part in typing.get_args(hint) for arm in _arms(part)]


def _records_at(hint: Any) -> list[type[Record]]:
    return [arm for arm in _arms(hint) if isinstance(arm, type) and issubclass(arm, Record)]
