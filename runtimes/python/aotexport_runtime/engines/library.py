"""Shared libraries of compiled graphs, loaded into this process.

The one file of the runtime that uses a private name of torch: AOTInductor's runner, which has no public one that does
without importing torch's compiler. Where a torch moves it, programs run their graphs.
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
        return runner(str(path), 1).run
    except (AttributeError, RuntimeError, TypeError) as error:
        reason = first_line(error)
        raise NotSupported(f"the library `{path.name}` cannot be loaded: {reason}") from None
