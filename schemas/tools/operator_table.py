"""The operators as data, `schemas/v1/operators.json`: made of the lists that the runtime reads, and of torch's tags.

A row of `aten` is a signature, with `random` if it draws random numbers (7.13), and what says the dtypes of its results
(7.33). What operators of other namespaces take is a kind an operand.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from aotexport_runtime.allowed.operators import OPERANDS, VIEWS, operator_sets
from aotexport_runtime.validate.types import rule_of

TABLE = Path(__file__).parents[1] / "v1/operators.json"

Row = dict[str, Any]


def table() -> dict[str, Any]:
    """Return what the file must hold. Operators that it has keep their tags: a set never changes (7.26)."""
    written = json.loads(TABLE.read_text(encoding="utf-8"))["sets"] if TABLE.exists() else {}
    known = {row["signature"]: "random" in row for rows in written.values() for row in rows}
    sets = {
        name: [_row(op, signature, known) for op, signature in rows.items()] for name, rows in operator_sets().items()
    }
    return {"sets": sets, "operands": OPERANDS, "views": sorted(VIEWS)}


def _row(op: str, signature: str, known: dict[str, bool]) -> Row:
    rule = rule_of(f"aten::{op}", signature)
    row: Row = {"signature": signature}
    if known[signature] if signature in known else _is_random(op):
        row["random"] = True
    if rule is not None and rule.kind:
        row["dtypes"] = rule.kind
    if rule is not None and rule.gives is not None:
        row["dtype"] = rule.gives.name
    return row


def _is_random(op: str) -> bool:
    import torch

    base, _, overload = op.partition(".")
    return torch.Tag.nondeterministic_seeded in getattr(getattr(torch.ops.aten, base), overload).tags


def text_of(content: dict[str, Any]) -> str:
    """Return the text of the file: a line per row and operator."""
    sets = ",\n".join(f'  "{name}": [\n{_lines(map(json.dumps, rows))}\n  ]' for name, rows in content["sets"].items())
    operands = _lines(f"{json.dumps(op)}: {json.dumps(kinds)}" for op, kinds in content["operands"].items())
    views = json.dumps(content["views"])
    return f'{{\n "sets": {{\n{sets}\n }},\n "operands": {{\n{operands}\n }},\n "views": {views}\n}}\n'


def _lines(texts: Any) -> str:
    return ",\n".join(f"   {text}" for text in texts)
