"""An environment in which the repository is installed as its pages say: from wheels, and not editable."""

import re
import shutil
import sys
import sysconfig
import venv
from pathlib import Path

from tests.e2e.processes import ROOT, run

_OURS = ("aotexport", "__editable__")
_SOURCES = ("aotexport", "runtimes", "pyproject.toml", "README.md", "LICENSE")
_LEFT_OUT = shutil.ignore_patterns("build", "*.egg-info", "__pycache__", ".venv")


def install_lines(page: str) -> list[str]:
    """Return the lines of a page that install, without their comments."""
    text = (ROOT / page).read_text(encoding="utf-8")
    return [line.strip() for line in re.findall(r"^(pip install [^#\n]*)", text, re.MULTILINE)]


def make(directory: Path, lines: list[str]) -> Path:
    """Make an environment of the packages here but this repository's, run the lines in it; return its interpreter.

    What builds is borrowed too: pip does not fetch it anew, which takes longer than the build.
    """
    environment, sources = directory / "venv", directory / "sources"
    venv.create(environment, with_pip=False)
    paths = {"base": str(environment), "platbase": str(environment)}
    _borrow_packages(Path(sysconfig.get_path("purelib", vars=paths)))
    for name in _SOURCES:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        sources.mkdir(exist_ok=True)
        copy(ROOT / name, sources / name, **({"ignore": _LEFT_OUT} if copy is shutil.copytree else {}))
    python = environment / "bin" / "python"
    for line in lines:
        run("env", "PIP_NO_BUILD_ISOLATION=0", python, "-m", *line.split(), "--quiet", cwd=sources)
    return python


def _borrow_packages(site: Path) -> None:
    """Link what is installed here, so that pip finds it, but for this repository's own distributions."""
    for folder in [Path(entry) for entry in sys.path if Path(entry).name == "site-packages"]:
        for package in folder.iterdir():
            link = site / package.name
            if not package.name.startswith(_OURS) and package.suffix != ".pth" and not link.exists():
                link.symlink_to(package)
