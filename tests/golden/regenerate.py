"""Export the goldens of the current format anew: `python -m tests.golden.regenerate [case ...]`.

Each golden is a directory `v<format>/<case>` with the bundle and its readable text, `expected.txt`. The goldens of a
released format are what its readers were released with, and are never written again.
"""

import shutil
import sys
from pathlib import Path

import torch

import aotexport
from aotexport_runtime.bundle.read import Bundle, open_bundle
from aotexport_runtime.execution.autocast import under_autocast
from aotexport_runtime.module.describe import describe
from aotexport_runtime.schema.versions import FORMAT_VERSION, format_version
from tests.golden.cases import CASES

HERE = Path(__file__).parent
RELEASED = HERE.parents[1] / "schemas/v1/released"


def regenerate(names: list[str], directory: Path, *, released: Path = RELEASED) -> None:
    """Write goldens below `directory`.

    Args:
        names: of the cases; empty: those that no released format has a golden of, and other goldens are removed.
        directory: where to; `v<format>` is made below it.
        released: directory of the locks of released formats.

    Raises:
        SystemExit: the format is released, or a case is unknown.
    """
    version = format_version(FORMAT_VERSION)
    if (released / f"{version}.json").exists():
        raise SystemExit(f"format {version} is released: its goldens stay as they are; raise FORMAT_VERSION first")
    unknown = [name for name in names if name not in CASES]
    if unknown:
        raise SystemExit(f"no case {', '.join(unknown)}; there are {', '.join(CASES)}")
    target = directory / f"v{version}"
    if not names:
        shutil.rmtree(target, ignore_errors=True)
    old = {golden.name for lock in released.glob("*.json") for golden in (directory / f"v{lock.stem}").iterdir()}
    for name in names or [name for name in CASES if name not in old]:
        write_golden(name, target / name)


def write_golden(name: str, directory: Path) -> None:
    """Export case `name` to `directory`, with its text."""
    torch.manual_seed(0)
    case = CASES[name]()
    with torch.set_grad_enabled(True), under_autocast("cpu", case.autocast):
        aotexport.export(
            case.model,
            case.args,
            case.kwargs,
            output=directory / "bundle",
            programs=case.programs,
            dynamic_shapes=case.dynamic_shapes,
            verify=False,
            force=True,
            source_root=HERE,
        )
    (directory / "expected.txt").write_text(text_of(open_bundle(directory / "bundle")), encoding="utf-8")


def text_of(bundle: Bundle) -> str:
    """Return what `expected.txt` holds."""
    return describe(bundle, graph=True) + "\n"


if __name__ == "__main__":
    regenerate(sys.argv[1:], HERE)
