"""Files that an export has read: installed ones are told by size and time, all others by content."""

from __future__ import annotations

import functools
import hashlib
import os
import shutil
import site
import stat
import sys
import sysconfig
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import ModuleType

import torch

import aotexport_runtime

_OWN = tuple(f"{Path(package).parent}/" for package in (Path(__file__).parent, aotexport_runtime.__file__))
_SCHEMES = sysconfig.get_paths()
_INSTALLED = tuple(
    f"{folder}/"
    for folder in (
        *(_SCHEMES[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")),
        *site.getsitepackages(),
        site.getusersitepackages(),
    )
)
_NOT_FILES = ("/proc/", "/sys/", "/dev/")
_COMPILERS = ("c++", "g++", "gcc", "cc", "clang++", "clang")


@functools.cache
def is_installed(file: str) -> bool:
    """Return whether a file is of Python, of an installed package, or of aotexport; a package in place is not."""
    return file.startswith((*_INSTALLED, *_OWN, "<frozen "))


def is_installed_module(module: ModuleType) -> bool:
    """Return whether a module is built into Python or installed; a part of a library, without a file, as the whole."""
    name = module.__name__
    while name:
        if name in sys.builtin_module_names:
            return True
        if file := getattr(sys.modules.get(name), "__file__", None):
            return is_installed(file)
        name = name.rpartition(".")[0]
    return False


def states(opened: Iterable[str], root: Path) -> dict[str, str]:
    """Return the state of each file of an imported module, and of further ones.

    Args:
        opened: absolute paths of the further ones. Left out are those of aotexport, whose sources are digested whole,
            compiled code that Python keeps beside sources, and what the system makes up.
        root: directory below which files are named by their place in it.
    """
    modules = (getattr(module, "__file__", None) for module in list(sys.modules.values()))
    files = dict.fromkeys((*(file for file in modules if isinstance(file, str)), *opened))
    left_out = (*_NOT_FILES, *_OWN)
    kept = [file for file in files if not file.startswith(left_out) and "/__pycache__/" not in file]
    return {file.removeprefix(f"{root}/"): state(file) for file in kept}


def state(file: str) -> str:
    """Return what tells the state of a file, or of the archive that it is in: one text whenever there is none."""
    try:
        known = os.stat(file)
        if not stat.S_ISREG(known.st_mode):
            return "no file"
        if is_installed(file):
            return f"{known.st_size} {known.st_mtime_ns}"
        with open(file, "rb") as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()
    except NotADirectoryError:
        return state(os.path.dirname(file))
    except OSError:
        return "no file"


def changed(before: Mapping[str, str], root: Path) -> str | None:
    """Return a file whose state is another than `before`; None: there is none."""
    return next((file for file, known in before.items() if state(str(root / file)) != known), None)


def written_since(files: Iterable[str], root: Path, since_ns: int) -> str | None:
    """Return a file, not installed, that was written since a time: what was read of it may be what it held before."""
    for file in files:
        path = root / file
        if not is_installed(str(path)) and path.is_file() and path.stat().st_ctime_ns >= since_ns:
            return file
    return None


def installed_packages() -> list[str]:
    """Return the names, with versions, of what is installed in the directories that Python imports from."""
    folders = [folder for folder in sys.path if is_installed(f"{folder}/") and os.path.isdir(folder)]
    return [f"{folder}/{name}" for folder in folders for name in sorted(os.listdir(folder)) if name != "__pycache__"]


def own_sources() -> dict[str, str]:
    """Return the digests of all files of the exporter and the runtime, whether imported or not."""
    paths = [path for folder in _OWN for path in sorted(Path(folder).rglob("*.py"))]
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}


def libraries_of_torch() -> list[str]:
    """Return the sizes and times of torch's libraries, which the system loads without Python."""
    paths = sorted(Path(torch.__file__).with_name("lib").glob("*.so*"))
    return [f"{path.name} {state(str(path))}" for path in paths]


def compilers() -> list[str]:
    """Return the compilers that a library for processors would be made with, and the times when they were written."""
    found = [os.path.realpath(path) for name in _COMPILERS if (path := shutil.which(name)) is not None]
    return [f"{path} {os.stat(path).st_mtime_ns}" for path in found]
