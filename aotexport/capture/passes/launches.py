"""Launches of Triton kernels: record them in a trace, replace them by calls that a record can hold, or refuse them.

Operators of `torch.library.triton_op` have another implementation to run on CPUs. A kernel that the model launches
itself has none: its launch runs as compiled code or not at all.
"""

from __future__ import annotations

import contextlib
import operator
import os
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from aotexport.capture.trace.forward_capture import ForwardCapture
from aotexport.errors import ExportFailed
from aotexport.model.source_lines import user_line
from aotexport.process.patches import Patch, patched
from aotexport.torch_internals.launches import LAUNCHES, kernel_of, launch_operands, launch_recorded, written_operands
from aotexport.torch_internals.names import runs_triton, triton_runs_on_cpu

_OPERATOR = (
    "make it an operator (torch.library.triton_op, torch.library.wrap_triton) and register what CPUs run in its "
    "place, `operator.register_kernel('cpu')(function)`"
)


@contextlib.contextmanager
def launches_traced() -> Iterator[None]:
    """Record the kernels that a model launches itself in the trace, or refuse them."""
    if "triton" not in sys.modules:
        yield
        return
    from triton.runtime.autotuner import Autotuner
    from triton.runtime.jit import JITFunction
    from triton.tools.tensor_descriptor import TensorDescriptor

    def run(kernel: Any, *args: Any, **kwargs: Any) -> None:
        said = f"{user_line()}the Triton kernel `{_name_of(kernel)}`"
        if any(isinstance(value, TensorDescriptor) for value in (*args, *kwargs.values())):
            raise ExportFailed(
                f"{said} takes a tensor descriptor, which a bundle cannot hold. Pass the tensor and its sizes, and "
                "make pointers in the kernel"
            )
        try:
            launch_recorded(kernel, args, kwargs)
        except RuntimeError as error:
            raise ExportFailed(f"{said}: {error}") from error

    launch = [Patch(kind, "run", run, "Record launches of Triton kernels") for kind in (JITFunction, Autotuner)]
    with patched(*launch):
        yield


def _name_of(kernel: Any) -> str:
    """Return the name of a kernel, tuned or not."""
    while not hasattr(kernel, "__name__"):
        kernel = kernel.fn
    return kernel.__name__


def launched(name: str, operands: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Replace the launch of a kernel in a functional graph; would return the new contents of written operands."""
    raise RuntimeError(f"the Triton kernel `{name}` does not run on this machine")


def name_launch(module: torch.fx.GraphModule, node: torch.fx.Node) -> None:
    """Replace a launch in a functional graph by a call of `launched`."""
    written = written_operands(node)
    with module.graph.inserting_before(node):
        call = module.graph.call_function(launched, launch_arguments(node))
    call.meta = {**node.meta, "val": [node.meta["val"][name] for name in written]}
    for item in list(node.users):
        assert item.target is operator.getitem
        item.args = (call, written.index(item.args[1]))  # type: ignore[arg-type]
    module.graph.erase_node(node)


def launch_arguments(node: torch.fx.Node) -> tuple[str, list[torch.fx.Node]]:
    """Return the arguments of a launch in a record: the kernel's name, and the tensors passed to it."""
    return _name_of(kernel_of(node)), list(launch_operands(node).values())


def launched_kernels(graph: torch.fx.GraphModule) -> tuple[str, ...]:
    """Return the names of the kernels that a forward graph launches: those that the model launches itself."""
    graphs = [module.graph for module in graph.modules() if isinstance(module, torch.fx.GraphModule)]
    nodes = [node for each in graphs for node in each.nodes if node.target in LAUNCHES]
    return tuple(dict.fromkeys(_name_of(kernel_of(node)) for node in nodes))


def refuse_kernels_without_cpu(forward: ForwardCapture) -> None:
    """Refuse a program on CPUs with operators that have Triton kernels and no implementation for CPUs."""
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


def refuse_launches(forward: ForwardCapture, *, grad: bool, compiled: bool) -> None:
    """Refuse a program whose model launches kernels itself, if no form of the program could run.

    Args:
        forward: the program.
        grad: whether it is for calls that record gradients.
        compiled: whether kernels for NVIDIA GPUs are compiled.
    """
    for name in forward.launched:
        said = f"the model launches the Triton kernel `{name}` itself"
        if grad:
            raise ExportFailed(
                f"{said}, and autograd knows no gradient of it. Leave out programs with gradients "
                f"(`programs=('infer',)`), or {_OPERATOR} and its gradient, `operator.register_autograd(function)`"
            )
        if not compiled:
            raise ExportFailed(
                f"{said}, which only kernels that are compiled for NVIDIA GPUs can do: export with `--target cuda`, "
                f"or {_OPERATOR}"
            )
