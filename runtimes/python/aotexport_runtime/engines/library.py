"""Shared libraries of compiled graphs, loaded into this process.

It uses a private name of torch: AOTInductor's runner, which has no public one that does without importing torch's
compiler. Where a torch moves it, programs run their graphs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from aotexport_runtime.errors import NotSupported, first_line

Runner = Callable[[Sequence[torch.Tensor]], list[torch.Tensor]]
"""A loaded library: called with its inputs, returns its results."""


def load_library(path: Path) -> Runner:
    """Load the shared library at `path`, which runs code of it.

    Args:
        path: a file that the caller trusts.

    Raises:
        NotSupported: it cannot be loaded here.
    """
    try:
        runner: Any = torch._C._aoti.AOTIModelContainerRunnerCpu  # pyright: ignore[reportPrivateUsage, reportAttributeAccessIssue]
        return runner(loader_name(path), 1).run
    except (AttributeError, RuntimeError, TypeError) as error:
        reason = first_line(error)
        raise NotSupported(f"the library `{path.name}` cannot be loaded: {reason}") from None


_names: dict[tuple[str, int, int], str] = {}
"""By path, device and inode: what files were loaded by."""


def loader_name(path: Path) -> str:
    """Return the name by which the system's loader finds the file that is at `path` now.

    The loader takes a name that it has loaded for the same file, whatever has taken its place since: another export to
    the same directory, a link that leads elsewhere. Another spelling of the path makes it look.

    Raises:
        OSError: there is no such file.
    """
    status = path.stat()
    key = str(path), status.st_dev, status.st_ino
    if key not in _names:
        before = sum(other == key[0] for other, *_ in _names)
        _names[key] = f"{path.parent}/{'./' * before}{path.name}"
    return _names[key]
