"""What the README and the guides show, run as shown: blocks in order, one directory per page."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.processes import ROOT, run

PAGES = (
    "README.md",
    "docs/getting-started.md",
    "docs/model-files.md",
    "docs/onnx.md",
    "docs/performance.md",
    "docs/runtime.md",
    "docs/trainers.md",
)
PROSE = (*PAGES, "CONTRIBUTING.md", "docs/troubleshooting.md", "docs/what-is-captured.md", "runtimes/python/README.md")
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


def run_shell(line: str, directory: Path) -> None:
    """Run a line that calls a command of this repository; installing is left to `make`."""
    if line.startswith(COMMANDS):
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        run("env", f"PATH={path}", "bash", "-euc", line, cwd=directory)


@pytest.mark.parametrize("page", PAGES)
def test_blocks_of_a_page_run_in_order(page: str, tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(MODEL, encoding="utf-8")
    for kind, text in steps((ROOT / page).read_text(encoding="utf-8")):
        if kind == "python":
            run(sys.executable, "-W", "error", "-c", text, cwd=tmp_path)
        elif kind == "sh":
            for line in text.splitlines():
                run_shell(line, tmp_path)
        else:
            (tmp_path / kind).write_text(text, encoding="utf-8")


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
