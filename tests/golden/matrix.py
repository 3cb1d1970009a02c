"""Write `docs/versions.md`: which goldens run, and which tests of the exporter pass, under which torch.

    python -m tests.golden.matrix --run .venv-2.7/bin/python --run .venv/bin/python --tests .venv/tests.xml

Each interpreter of `--run` has torch, numpy, msgspec and safetensors, and runs the recorded calls of all goldens with
this tree's runtime. Each file of `--tests` is what `make test-torch` leaves: results of pytest with torch's version.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import xml.etree.ElementTree as ET
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/versions.md"
GOLDENS = sorted(Path(__file__).parent.glob("v*/*/bundle"))
TARGETS = ("portable", "autograd")
_VERSIONS = (
    "import json, platform, numpy, torch; "
    "print(json.dumps([torch.__version__, platform.python_version(), numpy.__version__]))"
)

HEAD = """\
# Versions

Written by `python -m tests.golden.matrix`, from results alone.

The **exporter** takes torch 2.13 to 2.15. Another release is refused in one line; `--allow-untested-torch` tries it.
What differs between the releases stands in one file, `aotexport/torch_internals/releases.py`.
`make test-torch TORCH='==2.15.*'` runs the tests under a release, in an environment of its own.

The **runtime** takes torch 2.7 and newer. A bundle names the operators that it calls, with their signatures. At load
they are compared with the running torch's; section 7 of `schemas/README.md` lists the differences that adapters make
up for, and any other is refused by name.
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


def tests_of(path: Path) -> tuple[str, dict[str, int], list[str]]:
    """Return torch's version, the counts and the failed tests of a file of results."""
    suites = ET.parse(path).getroot().findall("testsuite")
    properties = {each.get("name"): each.get("value") or "" for suite in suites for each in suite.iter("property")}
    counts = {
        name: sum(int(suite.get(name, "0")) for suite in suites) for name in ("tests", "failures", "errors", "skipped")
    }
    failed = [
        f"{case.get('classname')}.{case.get('name')}"
        for suite in suites
        for case in suite.iter("testcase")
        if case.find("failure") is not None or case.find("error") is not None
    ]
    return properties["torch"], counts, failed


def page(runs: list[Run], tests: list[tuple[str, dict[str, int], list[str]]]) -> str:
    """Return the page."""
    lines = [HEAD, "## Goldens by the runtime", ""]
    lines += [f"Of {len(GOLDENS)} goldens, those that give the recorded results:", ""]
    lines += ["| torch | Python | numpy | " + " | ".join(f"`{target}`" for target in TARGETS) + " |", "|---" * 5 + "|"]
    for each in runs:
        counts = [str(len(GOLDENS) - len(each.failed[target])) for target in TARGETS]
        lines.append(f"| {each.torch} | {each.python} | {each.numpy} | {' | '.join(counts)} |")
    reasons: dict[str, list[str]] = {}
    for each in runs:
        for target in TARGETS:
            for golden, reason in each.failed[target].items():
                text = f"`{golden}` by `{target}`: {reason.split('. ')[0]}"
                reasons.setdefault(text, []).append(each.torch.split("+")[0])
    if reasons:
        releases = {reason: ", ".join(dict.fromkeys(found)) for reason, found in reasons.items()}
        lines += ["", "Others:", "", *(f"- {reason} (torch {found})" for reason, found in releases.items())]
    if tests:
        lines += ["", "## Tests of the exporter", "", "| torch | passed | skipped | failed |", "|---|---|---|---|"]
        for version, found, _ in tests:
            bad = found["failures"] + found["errors"]
            lines.append(f"| {version} | {found['tests'] - bad - found['skipped']} | {found['skipped']} | {bad} |")
        for version, _, failed in tests:
            lines += ["", f"Failed under {version}:", "", *(f"- `{name}`" for name in failed)] if failed else []
    return "\n".join(lines) + "\n"


def main() -> None:
    """Write the page."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--run", action="append", default=[], metavar="PYTHON", help="run the goldens by it")
    parser.add_argument("--tests", action="append", default=[], type=Path, metavar="FILE", help="results of tests")
    options = parser.parse_args()
    PAGE.write_text(page([run(python) for python in options.run], [tests_of(path) for path in options.tests]), "utf-8")


if __name__ == "__main__":
    main()
