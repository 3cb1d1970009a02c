"""The page on security names a test for each threat."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_each_threat_names_tests_that_exist() -> None:
    page = (ROOT / "docs/security.md").read_text()
    table = page.partition("## Threats and defences")[2].partition("\n## ")[0]
    rows = [line.split(" | ") for line in table.splitlines() if line.startswith("| ")][1:]
    tests = [re.findall("`([^`]*)`", row[-1]) for row in rows]
    assert len(rows) > 15
    assert all(tests)
    assert [name for names in tests for name in names if not (ROOT / "tests" / name).is_file()] == []
