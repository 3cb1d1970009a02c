"""Triton kernels in models: they run on GPUs alone, so a model on CPUs needs something to run in their place."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import Any

import torch

from aotexport.capture.forward_capture import ForwardCapture
from aotexport.capture.patches import replaced
from aotexport.errors import ExportFailed
from aotexport.torch_internals.names import runs_triton, triton_runs_on_cpu

_WAY_OUT = (
    "Make it an operator (torch.library.triton_op, torch.library.wrap_triton) and register what CPUs run in its "
    "place, `operator.register_kernel('cpu')(function)`"
)


@contextlib.contextmanager
def direct_launches_refused() -> Iterator[None]:
    """Refuse kernels that a model launches itself, by their names, while it is traced."""
    if "triton" not in sys.modules:
        yield
        return
    from triton.runtime.autotuner import Autotuner
    from triton.runtime.jit import JITFunction

    def refuse(kernel: Any, *args: Any, **kwargs: Any) -> Any:
        name = getattr(kernel.fn, "__name__", None) or getattr(kernel, "base_fn", kernel).__name__
        raise ExportFailed(f"the model launches the Triton kernel `{name}`, which no graph can hold. {_WAY_OUT}")

    with replaced(JITFunction, "run", refuse), replaced(Autotuner, "run", refuse):
        yield


def refuse_kernels_without_cpu(forward: ForwardCapture) -> None:
    """Refuse a program on CPUs with operators that run Triton kernels, and nothing on CPUs.

    Raises:
        ExportFailed: names the operator.
    """
    devices = {value.device.type for value in forward.inputs if isinstance(value, torch.Tensor)}
    if "cpu" not in devices or os.environ.get("TRITON_INTERPRET") == "1":
        return
    for node in forward.graph.graph.nodes:
        if runs_triton(node.target) and not triton_runs_on_cpu(node.target):
            name = node.target._schema.name
            raise ExportFailed(
                f"operator `{name}` runs Triton kernels, which CPUs cannot, and what the bundle computes is recorded "
                "on a CPU. Register what CPUs run in its place, `operator.register_kernel('cpu')(function)`"
            )
