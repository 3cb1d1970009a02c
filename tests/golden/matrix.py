"""Write `docs/versions.md`: which goldens run, and which tests pass, under which Python, torch and NumPy.

    python -m tests.golden.matrix --run .venv/bin/python .venv-torch/*/bin/python --tests .venv-torch/*/tests.xml

Each interpreter of `--run` has torch, numpy, msgspec and safetensors, and runs the recorded calls of all goldens with
this tree's runtime. The files of `--tests` are what `make test-torch` leaves: results of pytest with the versions.
Those of the same versions are added; of a test in several of them, the last result counts. The section of an option
that is left out stays as it was, and so do the rows of other versions: those of tests without failures.
"""

import argparse
import json
import os
import re
import subprocess
import xml.etree.ElementTree as ET
from collections import Counter
from dataclasses import dataclass, field
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

HEAD = """\
# Versions

Written by `python -m tests.golden.matrix`, from results alone.

The **exporter** takes torch 2.13 to 2.15. Another release is refused in one line; `--allow-untested-torch` tries it.
What differs between the releases stands in one file, `aotexport/torch_internals/releases.py`.
`make test-torch TORCH='==2.15.*' PYTHON=python3.13` runs the tests under a release, in an environment of its own;
`make test-versions` does so for every pair of `PYTHONS` and `TORCHES`.

The **runtime** takes torch 2.7 and newer. A bundle names the operators that it calls, with their signatures. At load
they are compared with the running torch's; section 7 of `schemas/README.md` lists the differences that adapters make
up for, and any other is refused by name.

Both refuse a **Python** that runs without its global interpreter lock (a free-threaded build), in a line that says how
to run it with the lock.
"""


@dataclass(frozen=True)
class Run:
    """What an interpreter made of the goldens.

    Attributes:
        torch: its version of torch.
        python: its version of Python.
        numpy: its version of NumPy.
        failed: per target, the goldens that did not give the recorded results, with the reason.
    """

    torch: str
    python: str
    numpy: str
    failed: dict[str, dict[str, str]]


def run(python: str) -> Run:
    """Run the recorded calls of all goldens by an interpreter.

    Raises:
        RuntimeError: the self-test gives no results.
    """
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "runtimes/python"), "OMP_NUM_THREADS": "1"}
    versions = subprocess.run([python, "-c", _VERSIONS], capture_output=True, text=True, check=True)
    failed: dict[str, dict[str, str]] = {}
    for target in TARGETS:
        command = [python, "-W", "ignore", "-m", "aotexport_runtime", "selftest", *map(str, GOLDENS)]
        process = subprocess.run(
            [*command, "--target", target, "--json"], capture_output=True, text=True, env=environment, check=False
        )
        if process.returncode not in (0, 1) or not process.stdout:
            raise RuntimeError(f"the self-test of {python} ended with {process.returncode}: {process.stderr[-1000:]}")
        results = json.loads(process.stdout.splitlines()[-1])
        failed[target] = {
            Path(each["bundle"]).parent.name: each["error"] or "other results" for each in results if not each["agrees"]
        }
    return Run(*json.loads(versions.stdout), failed=failed)


@dataclass
class Tests:
    """What pytest said under some versions.

    Attributes:
        modules: the test modules that were run.
        passed, skipped: numbers of tests.
        failed: names of tests.
    """

    modules: set[str] = field(default_factory=set)
    passed: int = 0
    skipped: int = 0
    failed: list[str] = field(default_factory=list)


def tests_of(paths: list[Path]) -> dict[tuple[str, ...], Tests]:
    """Return the results in pytest's files by the versions of torch, Python and NumPy; of a test, the last one."""
    outcomes: dict[tuple[str, ...], dict[tuple[str, str], str]] = {}
    for path in paths:
        root = ET.parse(path).getroot()
        properties = {each.get("name"): each.get("value") or "" for each in root.iter("property")}
        own = outcomes.setdefault(tuple(properties[name] for name in ("torch", "python", "numpy")), {})
        for case in root.iter("testcase"):
            found = {each.tag for each in case}
            outcome = "failed" if found & {"failure", "error"} else "skipped" if "skipped" in found else "passed"
            own[case.get("classname", ""), case.get("name", "")] = outcome
    return {versions: _counted(own) for versions, own in outcomes.items()}


def _counted(outcomes: dict[tuple[str, str], str]) -> Tests:
    counts = Counter(outcomes.values())
    failed = [f"{module}.{name}" for (module, name), outcome in outcomes.items() if outcome == "failed"]
    return Tests({module for module, _ in outcomes}, counts["passed"], counts["skipped"], failed)


def goldens_section(runs: list[Run], before: str = "") -> str:
    """Return the section about goldens, with the rows and reasons of `before` that are of other versions.

    Args:
        runs: what interpreters made of the goldens.
        before: the section as it is; of other goldens, it counts for nothing.
    """
    title = f"Of {len(GOLDENS)} goldens, those that give the recorded results:"
    lines = [GOLDENS_TITLE, "", title, ""]
    lines += ["| torch | Python | numpy | " + " | ".join(f"`{target}`" for target in TARGETS) + " |", "|---" * 5 + "|"]
    earlier = before.splitlines() if title in before else []
    own = {(each.torch, each.python, each.numpy) for each in runs}
    rows = [tuple(line.strip("| ").split(" | ")) for line in earlier if line.startswith("| ") and "`" not in line]
    rows = [row for row in rows if row[:3] not in own]
    reasons: dict[str, list[str]] = {}
    for line in earlier:
        if found := re.fullmatch(r"- (.*) \(torch ([^()]*)\)", line):
            kept_releases = {row[0].split("+")[0] for row in rows} & set(found[2].split(", "))
            reasons[found[1]] = sorted(kept_releases)
    for each in runs:
        counts = (str(len(GOLDENS) - len(each.failed[target])) for target in TARGETS)
        rows.append((each.torch, each.python, each.numpy, *counts))
        for target in TARGETS:
            for golden, reason in each.failed[target].items():
                text = f"`{golden}` by `{target}`: {reason.split('. ')[0]}"
                reasons.setdefault(text, []).append(each.torch.split("+")[0])
    lines += [f"| {' | '.join(row)} |" for row in sorted(rows, key=lambda row: _numbers(*row[:3]))]
    releases = {
        reason: ", ".join(sorted(set(found), key=_numbers)) for reason, found in sorted(reasons.items()) if found
    }
    if releases:
        lines += ["", "Others:", "", *(f"- {reason} (torch {found})" for reason, found in releases.items())]
    return "\n".join(lines) + "\n"


def _numbers(*versions: str) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(map(int, re.findall(r"\d+", version))) for version in versions)


def tests_section(tests: dict[tuple[str, ...], Tests], before: str) -> str:
    """Return the section about tests, with the rows of `before` that are of other versions and without failures."""
    lines = [TESTS_TITLE, "", f"Of {len(TEST_FILES)} test files, those that were run, without slow tests:", ""]
    lines += ["| torch | Python | numpy | test files | passed | skipped | failed |", "|---" * 7 + "|"]
    rows = [tuple(line.strip("| ").split(" | ")) for line in before.splitlines() if line.endswith(" | 0 |")]
    rows = [row for row in rows if row[:3] not in tests]
    for versions, found in tests.items():
        counts = map(str, (len(found.modules), found.passed, found.skipped, len(found.failed)))
        rows.append((*versions, *counts))
    lines += [f"| {' | '.join(row)} |" for row in sorted(rows)]
    for (torch, python, _), found in sorted(tests.items()):
        names = [f"- `{name}`" for name in found.failed]
        lines += ["", f"Failed under torch {torch} with Python {python}:", "", *names] if names else []
    return "\n".join(lines) + "\n"


def kept(page: str, title: str) -> str:
    """Return the section of a page with a title; empty: it has none."""
    _, found, rest = page.partition(title)
    return found and f"{found}{rest.partition(chr(10) + '## ')[0].rstrip()}\n"


def main() -> None:
    """Write the page."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--run", nargs="+", default=[], metavar="PYTHON", help="run the goldens by each")
    parser.add_argument("--tests", nargs="+", default=[], type=Path, metavar="FILE", help="results of tests")
    options = parser.parse_args()
    before = PAGE.read_text("utf-8") if PAGE.exists() else ""
    goldens = kept(before, GOLDENS_TITLE)
    if options.run:
        goldens = goldens_section([run(python) for python in options.run], goldens)
    earlier = kept(before, TESTS_TITLE)
    tests = tests_section(tests_of(options.tests), earlier) if options.tests else earlier
    PAGE.write_text("\n".join(filter(None, (HEAD, goldens, tests))), "utf-8")


if __name__ == "__main__":
    main()
