"""An error is compared so that NaN is beyond every limit: `error <= limit` agrees, and its negation does not."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PLACES = ("aotexport", "runtimes/python/aotexport_runtime", "benchmarks")
ERROR = re.compile(r"(^|_)(error|gap|difference|worst|absolute)$")
BEYOND, WITHIN = (ast.Gt, ast.GtE), (ast.Lt, ast.LtE)


def is_error(node: ast.expr) -> bool:
    """Return whether a name or attribute says that it is how far something is off."""
    name = node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
    return bool(ERROR.search(name))


def passing_nan(source: str) -> list[int]:
    """Return the lines of comparisons that are false where the error is NaN, and say that it is too large."""
    found: list[int] = []
    for node in ast.walk(ast.parse(source)):
        # Of a chain, `0 < error < limit`, the other link is false as well.
        if isinstance(node, ast.Compare) and len(node.ops) == 1:
            op, right = node.ops[0], node.comparators[0]
            if (isinstance(op, BEYOND) and is_error(node.left)) or (isinstance(op, WITHIN) and is_error(right)):
                found.append(node.lineno)
    return found


@pytest.mark.parametrize("place", PLACES)
def test_no_error_is_asked_whether_it_is_above_a_limit(place: str) -> None:
    files = sorted((ROOT / place).rglob("*.py"))
    assert files
    found = {str(file.relative_to(ROOT)): passing_nan(file.read_text(encoding="utf-8")) for file in files}
    assert {file: lines for file, lines in found.items() if lines} == {}
