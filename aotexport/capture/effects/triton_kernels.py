"""Triton kernels in models: they run on GPUs alone, while recorded calls are computed on CPUs.

Operators of `torch.library.triton_op` have another implementation to run on CPUs. A kernel that the model launches
itself has none: its launch is recorded, and runs as compiled code or not at all.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from aotexport.errors import ExportFailed
from aotexport.model.source_lines import user_line
from aotexport.process.patches import Patch, patched
from aotexport.torch_internals.launches import (
    launch_recorded,
    launches_checked,
)


@contextlib.contextmanager
def launches_traced() -> Iterator[None]:
    """Record the kernels that a model launches itself in the trace, instead of running them.

    Raises:
        ExportFailed: a bundle cannot hold a launch; names the kernel.
    """
    if "triton" not in sys.modules:
        yield
        return
    from triton.runtime.autotuner import Autotuner
    from triton.runtime.jit import JITFunction

    def run(kernel: Any, *args: Any, **kwargs: Any) -> None:
        try:
            launch_recorded(kernel, args, kwargs)
        except RuntimeError as error:
            raise ExportFailed(f"{user_line()}the Triton kernel `{name_of(kernel)}`: {error}") from error

    launch = [Patch(kind, "run", run, "Record launches of Triton kernels") for kind in (JITFunction, Autotuner)]
    with patched(*launch), launches_checked(_check):
        yield


def name_of(kernel: Any) -> str:
    """Return the name of a kernel, tuned or not."""
    while not hasattr(kernel, "__name__"):
        kernel = kernel.fn
    return kernel.__name__


def _check(kernel: Any, arguments: Sequence[Any]) -> None:
    """Refuse a kernel, or an argument of its launch, for which no compiled code can be made.

    Raises:
        ExportFailed: names the kernel.
    """
    said = f"{user_line()}the Triton kernel `{name_of(kernel)}`"
    configs = getattr(kernel, "configs", ())
    hooks = [name for name in ("pre_hook", "post_hook") if getattr(kernel, f"user_defined_{name}", False) is not False]
    hooks += ["pre_hook"] if any(config.pre_hook is not None for config in configs) else []
    if hooks:
        raise ExportFailed(
            f"{said} has a hook (`{hooks[0]}`), which is Python code, and a bundle holds none. Do what it does by "
            "operators of torch before the launch; arguments are zeroed and restored for tuning without "
            "(`reset_to_zero`, `restore_value`)"
        )
    if any(config.num_ctas != 1 for config in configs):
        raise ExportFailed(f"{said} runs in clusters of blocks (`num_ctas`), which no bundle launches. Use one block")
    if any(type(value).__name__ in ("TensorDescriptor", "GluonTensorDescriptor") for value in arguments):
        raise ExportFailed(
            f"{said} takes a tensor descriptor, which a bundle cannot hold. Pass the tensor and its sizes, and make "
            "pointers in the kernel"
        )
