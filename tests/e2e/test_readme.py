"""What the README and the guides show, run as shown: blocks in order, one directory per page."""

import os
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.processes import ROOT, run, run_command, run_python

INSTALLED = ("README.md", "docs/getting-started.md")
"""Pages that follow an install: the slow tests run them where it was done, from wheels."""
PAGES = ("README.md", "docs/coming-from.md", "docs/model-files.md", "docs/performance.md", "docs/runtime.md")
SLOW_PAGES = ("docs/another-head.md", "docs/fine-tuning.md", "docs/onnx.md", "docs/trainers.md")
"""What they show, `test_changed_modules.py`, `test_adapters.py`, `test_onnx.py` and `tests/trainers` test."""
OTHERS = (
    "CONTRIBUTING.md",
    "SECURITY.md",
    "docs/comparison.md",
    "docs/index.md",
    "docs/security.md",
    "docs/troubleshooting.md",
    "docs/what-is-captured.md",
    "runtimes/python/README.md",
)
PROSE = (*PAGES, *INSTALLED[1:], *SLOW_PAGES, *OTHERS)
COMMANDS = ("aotexport ", "python -m aotexport_runtime ")

MODEL = """
import torch

class model(torch.nn.Linear):
    def __init__(self):
        super().__init__(4, 1)

    def forward(self, x):
        return super().forward(x)

example_inputs = (torch.linspace(0, 1, 32).reshape(8, 4),)
"""

BLOCK = re.compile(r"^```(python|sh)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
FILE = re.compile(r"# (\w+\.py)\n")
LINK = re.compile(r"\]\((?!https?:)([^)#]+)\)")


def steps(text: str) -> Iterator[tuple[str, str]]:
    """Return what a page does, in order: `(file name or language, text)`. Scripts in a row are one script."""
    scripts: list[str] = []
    for language, block in [*BLOCK.findall(text), ("sh", "")]:
        named = FILE.match(block)
        if language == "python" and named is None:
            scripts.append(block)
            continue
        if scripts:
            yield "python", "".join(scripts)
            scripts = []
        yield (named[1] if named else language), block


def run_page(page: str, directory: Path, python: Path | None = None) -> None:
    """Run a page's scripts, and the lines that call a command of this repository.

    Args:
        page: path of the page. Installing is left to `make`, or done before.
        directory: where it runs.
        python: interpreter to run each step in a process with; None: run the steps in forks and in this process.
    """
    for kind, text in steps((ROOT / page).read_text(encoding="utf-8")):
        if kind == "python" and python is not None:
            run(python, "-W", "error", "-c", text, cwd=directory)
        elif kind == "python":
            run_python(None, cwd=directory, text=text)
        elif kind != "sh":
            (directory / kind).write_text(text, encoding="utf-8")
        else:
            for line in (line for line in text.splitlines() if line.startswith(COMMANDS)):
                if python is not None:
                    run("env", f"PATH={python.parent}:{os.environ['PATH']}", "bash", "-euc", line, cwd=directory)
                else:
                    run_command(*shlex.split(line, comments=True), cwd=directory)


@pytest.mark.slow
@pytest.mark.parametrize("page", INSTALLED)
def test_blocks_of_a_page_run_where_it_was_installed(page: str, installed_python: Path, tmp_path: Path) -> None:
    run_page(page, tmp_path, installed_python)


@pytest.mark.slow
def test_installed_packages_are_wheels_and_not_the_sources(installed_python: Path, tmp_path: Path) -> None:
    code = "import aotexport, aotexport_runtime; print(aotexport.__file__, aotexport_runtime.__file__)"
    for file in run(installed_python, "-c", code, cwd=tmp_path).split():
        assert Path(file).is_relative_to(installed_python.parents[1])


@pytest.mark.parametrize("page", [*PAGES, *(pytest.param(page, marks=pytest.mark.slow) for page in SLOW_PAGES)])
def test_blocks_of_a_page_run_in_order(page: str, tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(MODEL, encoding="utf-8")
    run_page(page, tmp_path)


@pytest.mark.parametrize("page", PROSE)
def test_links_of_a_page_lead_to_files(page: str) -> None:
    path = ROOT / page
    missing = [link for link in LINK.findall(path.read_text(encoding="utf-8")) if not (path.parent / link).exists()]
    assert missing == []


@pytest.mark.parametrize("page", PROSE)
def test_make_commands_of_a_page_exist(page: str) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    text = (ROOT / page).read_text(encoding="utf-8")
    named = set(re.findall(r"(?:`|^)make ([a-z-]+)", text, re.MULTILINE))
    assert named <= targets
