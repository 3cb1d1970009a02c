"""Write `docs/versions.md`: which goldens run, and which tests pass, under which Python, torch and NumPy.

    python -m tests.golden.matrix --run .venv/bin/python .venv-torch/*/bin/python --tests .venv-torch/*/tests.xml

Each interpreter of `--run` has torch, numpy, msgspec and safetensors, and runs the recorded calls of all goldens with
this tree's runtime. The files of `--tests` are what `make test-torch` leaves: results of pytest with the versions. Of a
test in several of the same versions, the last result counts. What the page says before its tables stays as it was, and
so do the rows of other versions: those of tests without failures.
"""

import argparse
import json
import os
import re
import subprocess
import xml.etree.ElementTree as ET
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/versions.md"
GOLDENS = sorted(Path(__file__).parent.glob("v*/*/bundle"))
TEST_FILES = [path for path in ROOT.glob("tests/**/test_*.py") if path.parent.name != "sweeps"]
TARGETS = ("portable", "autograd")
_VERSIONS = (
    "import json, platform, numpy, torch; "
    "print(json.dumps([torch.__version__, platform.python_version(), numpy.__version__]))"
)
GOLDENS_TITLE, TESTS_TITLE = "## Goldens by the runtime", "## Tests"
Row = tuple[str, ...]
"""Cells of a table; the first three are the versions of torch, Python and NumPy."""


def run(python: str) -> tuple[Row, dict[str, str]]:
    """Run the recorded calls of all goldens by an interpreter; return its row, and why goldens fail by their names.

    Raises:
        RuntimeError: the self-test gives no results.
    """
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "runtimes/python"), "OMP_NUM_THREADS": "1"}
    versions = subprocess.run([python, "-c", _VERSIONS], capture_output=True, text=True, check=True)
    row, reasons = [*json.loads(versions.stdout)], dict[str, str]()
    for target in TARGETS:
        command = [python, "-W", "ignore", "-m", "aotexport_runtime", "selftest", *map(str, GOLDENS)]
        process = subprocess.run(
            [*command, "--target", target, "--json"], capture_output=True, text=True, env=environment, check=False
        )
        if process.returncode not in (0, 1) or not process.stdout:
            raise RuntimeError(f"the self-test of {python} ended with {process.returncode}: {process.stderr[-1000:]}")
        failed = {
            f"`{Path(each['bundle']).parent.name}` by `{target}`": each["error"] or "other results"
            for each in json.loads(process.stdout.splitlines()[-1])
            if not each["agrees"]
        }
        row.append(str(len(GOLDENS) - len(failed)))
        reasons |= {name: reason.split(". ")[0] for name, reason in failed.items()}
    return tuple(row), reasons


def tests_of(paths: list[Path]) -> tuple[list[Row], dict[str, str]]:
    """Return the rows of results in pytest's files, and the versions under which tests fail by their names."""
    outcomes: dict[Row, dict[tuple[str, str], str]] = {}
    for path in paths:
        root = ET.parse(path).getroot()
        properties = {each.get("name"): each.get("value") or "" for each in root.iter("property")}
        own = outcomes.setdefault(tuple(properties[name] for name in ("torch", "python", "numpy")), {})
        for case in root.iter("testcase"):
            found = {each.tag for each in case}
            outcome = "failed" if found & {"failure", "error"} else "skipped" if "skipped" in found else "passed"
            own[case.get("classname", ""), case.get("name", "")] = outcome
    rows, failed = list[Row](), dict[str, str]()
    for versions, own in outcomes.items():
        counts = Counter(own.values())
        numbers = (len({module for module, _ in own}), counts["passed"], counts["skipped"], counts["failed"])
        rows.append((*versions, *map(str, numbers)))
        names = [f"`{module}.{name}`" for (module, name), outcome in own.items() if outcome == "failed"]
        failed |= dict.fromkeys(names, f"fails under torch {versions[0]} with Python {versions[1]}")
    return rows, failed


def section(title: str, says: str, columns: str, rows: list[Row], why: dict[str, str], earlier: list[str]) -> list[str]:
    """Return a table with the rows of other versions in the lines `earlier`, and what is said of names below it."""
    cells = [tuple(line.strip("| ").split(" | ")) for line in earlier if line.startswith("| ")]
    new = {row[:3] for row in rows}
    kept = [row for row in cells if row[0][0].isdecimal() and row[:3] not in new]
    table = sorted([*rows, *kept], key=lambda row: [[*map(int, re.findall(r"\d+", each))] for each in row[:3]])
    head = ["torch", "Python", "numpy", *columns.split(" | ")]
    lines = [f"| {' | '.join(row)} |" for row in [head, *table]]
    lines.insert(1, "|---" * len(head) + "|")
    return [title, "", says, "", *lines, *([""] if why else []), *(f"- {name}: {text}" for name, text in why.items())]


def main() -> None:
    """Write the page."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--run", nargs="+", default=[], metavar="PYTHON", help="run the goldens by each")
    parser.add_argument("--tests", nargs="+", default=[], type=Path, metavar="FILE", help="results of tests")
    options = parser.parse_args()
    head, _, rest = PAGE.read_text("utf-8").partition(GOLDENS_TITLE)
    goldens, _, tests = (part.splitlines() for part in rest.rstrip().partition(f"\n{TESTS_TITLE}"))
    goldens, tests = [GOLDENS_TITLE, *goldens[1:]], [TESTS_TITLE, *tests[1:]]
    if options.run:
        says = f"Of {len(GOLDENS)} goldens, those that give the recorded results:"
        runs = [run(python) for python in options.run]
        why = {name: text for _, reasons in runs for name, text in reasons.items()}
        columns = " | ".join(f"`{target}`" for target in TARGETS)
        goldens = section(
            GOLDENS_TITLE, says, columns, [row for row, _ in runs], why, goldens if says in goldens else []
        )
    if options.tests:
        says = f"Of {len(TEST_FILES)} test files, those that were run, without slow tests:"
        earlier = [line for line in tests if line.endswith(" | 0 |")]
        tests = section(TESTS_TITLE, says, "test files | passed | skipped | failed", *tests_of(options.tests), earlier)
    PAGE.write_text("\n".join([head.rstrip(), "", *goldens, *([""] * (goldens[-1] != "")), *tests]) + "\n", "utf-8")


if __name__ == "__main__":
    main()
