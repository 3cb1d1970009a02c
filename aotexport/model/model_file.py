"""A model file, which is the user's own code, as a Python module: found, run, its failures with the user's line."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import re
import sys
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from aotexport.errors import ModelFileInvalid
from aotexport.model.source_lines import is_user_file
from aotexport.process.objects import file_of
from aotexport.process.patches import Patch, patched
from aotexport_runtime.errors import AotExportError

DEFAULT_ATTRIBUTE = "model"
_DOTTED = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*")
_MAX_MESSAGE = 1000


@dataclass(frozen=True)
class ModelFile:
    """A model file that was run.

    Attributes:
        name: as the user wrote it, without the attribute.
        attribute: name of the model in it, dots for attributes of attributes.
        root: directory that its own imports, and recorded source lines, are relative to.
    """

    name: str
    attribute: str
    module: ModuleType
    root: Path


def open_model_file(where: str) -> ModelFile:
    """Run the model file at `model.py`, `model.py:attr` or `package.module:attr`, and return it.

    `ModelFileInvalid`: there is no such file or module, or its code raises.
    """
    name, attribute = _split(where)
    return _open_path(name, attribute) if name.endswith(".py") else _open_module(name, attribute)


def _split(where: str) -> tuple[str, str]:
    if where.endswith(".py"):
        return where, DEFAULT_ATTRIBUTE
    name, colon, attribute = where.rpartition(":")
    is_name = name.endswith(".py") or _DOTTED.fullmatch(name)
    if not colon or not is_name or not _DOTTED.fullmatch(attribute):
        raise ModelFileInvalid(f"`{where}` is no model file; write model.py, model.py:attr or package.module:attr")
    return name, attribute


def _open_path(name: str, attribute: str) -> ModelFile:
    path = Path(name).absolute()
    if not path.is_file():
        raise ModelFileInvalid(f"no file `{name}`")
    root = path.resolve().parent  # Where Python looks for modules beside a script.
    spec = importlib.util.spec_from_file_location(_module_name(path), path)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module.__name__] = module
    arguments = Patch(sys, "argv", [name], "Let code that reads the command line see its own, not that of aotexport")
    with importable(root), patched(arguments), user_code(f"running `{name}`", root):
        # Compiled here and not by the loader, which would write bytecode beside the user's file.
        exec(compile(path.read_bytes(), str(path), "exec"), vars(module))
    return ModelFile(name, attribute, module, root)


def _module_name(path: Path) -> str:
    """Return the module name that an import would use, unless another module has it (`inspect.py`)."""
    known = sys.modules.get(path.stem)
    free = known is None or file_of(known) == str(path)
    return path.stem if free and path.stem not in sys.stdlib_module_names else f"_aotexport_{path.stem}"


def _open_module(name: str, attribute: str) -> ModelFile:
    here = Path.cwd()
    with importable(here), user_code(f"importing `{name}`", here):
        module = importlib.import_module(name)
    top = sys.modules[name.partition(".")[0]]
    folders = list(getattr(top, "__path__", []))
    file = folders[0] if folders else getattr(top, "__file__", None)
    return ModelFile(name, attribute, module, Path(file).parent.absolute() if file else here)


@contextlib.contextmanager
def importable(directory: Path) -> Iterator[None]:
    """Let imports find modules in `directory` first, as for a script there."""
    entry = str(directory)
    sys.path.insert(0, entry)
    importlib.invalidate_caches()
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):
            sys.path.remove(entry)


@contextlib.contextmanager
def user_code(doing: str, root: Path) -> Iterator[None]:
    """Turn errors of the user's code, and exits, into one `ModelFileInvalid` with the user's line.

    `doing` is the action, for the message; `root` the directory of the user's own files.
    """
    try:
        yield
    except AotExportError:
        raise
    except (Exception, SystemExit) as error:
        message = error.msg if isinstance(error, SyntaxError) else str(error).strip()
        reason = type(error).__name__ + (f": {message[:_MAX_MESSAGE]}" if message else "")
        raise ModelFileInvalid(f"{doing} failed{_line(error, root)}: {reason}{_hint(error)}") from error


def _line(error: BaseException, root: Path) -> str:
    if isinstance(error, SyntaxError) and error.filename:
        return f" at {_shown(error.filename)}:{error.lineno}"
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if is_user_file(frame.filename)]
    own = [f for f in frames if Path(f.filename).is_relative_to(root) and "site-packages" not in f.filename]
    for frame in (own or frames)[-1:]:
        return f" at {_shown(frame.filename)}:{frame.lineno}"
    return ""


def _shown(file: str) -> str:
    path = Path(file)
    return os.path.relpath(path) if path.is_relative_to(Path.cwd()) else file


def _hint(error: BaseException) -> str:
    if isinstance(error, ImportError) and "no known parent package" in str(error):
        return ". A file in a package is named by its module: package.module:attr"
    if isinstance(error, SystemExit):
        return (
            ". A model file must run to its end, and has no command line of its own: parse options "
            '(argparse) in a block under `if __name__ == "__main__":`, which an export does not run'
        )
    return ""
