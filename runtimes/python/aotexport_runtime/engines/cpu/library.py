"""Shared libraries of compiled graphs, loaded into this process.

It uses a private name of torch: AOTInductor's runner. The public one imports torch's compiler. Where a torch moves the
runner, programs run their graphs.
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
    """Load the shared library at `path`; loading runs code of the library.

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
"""Names that files were loaded by; keys are path, device and inode."""


def loader_name(path: Path) -> str:
    """Return a name by which the system's loader opens the file that is at `path` now.

    The loader takes a known name for the file that it loaded before, even if another has replaced it: another export to
    the same directory, a link that leads elsewhere. Another spelling of the path makes the loader open the file.

    Raises:
        OSError: there is no such file.
    """
    status = path.stat()
    key = str(path), status.st_dev, status.st_ino
    if key not in _names:
        before = sum(other == key[0] for other, *_ in _names)
        _names[key] = f"{path.parent}/{'./' * before}{path.name}"
    return _names[key]
