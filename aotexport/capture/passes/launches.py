"""Launches of Triton kernels in graphs: name them, replace them by calls that a record can hold, or refuse them."""

from __future__ import annotations

import operator
import os
from collections.abc import Sequence

import torch

from aotexport.capture.effects.triton_kernels import name_of
from aotexport.capture.trace.forward_capture import ForwardCapture
from aotexport.errors import ExportFailed
from aotexport.torch_internals.launches import is_launch, kernel_of, launch_operands, written_operands
from aotexport.torch_internals.names import runs_triton, triton_runs_on_cpu

_OPERATOR = (
    "make it an operator (torch.library.triton_op, torch.library.wrap_triton) and register what CPUs run in its "
    "place, `operator.register_kernel('cpu')(function)`"
)


def launched(name: str, operands: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Replace the launch of a kernel in a functional graph; would return the new contents of written operands."""
    raise RuntimeError(f"the Triton kernel `{name}` does not run on this machine")


def name_launches(module: torch.fx.GraphModule) -> None:
    """Replace the launches in a functional graph by calls of `launched`.

    Args:
        module: changed in place.
    """
    for node in [node for node in module.graph.nodes if is_launch(node.target)]:
        written = written_operands(node)
        with module.graph.inserting_before(node):
            call = module.graph.call_function(launched, launch_arguments(node))
        call.meta = {**node.meta, "val": [node.meta["val"][name] for name in written]}
        for item in list(node.users):
            assert item.target is operator.getitem
            item.args = (call, written.index(item.args[1]))  # type: ignore[arg-type]
        module.graph.erase_node(node)
    module.recompile()


def launch_arguments(node: torch.fx.Node) -> tuple[str, list[torch.fx.Node]]:
    """Return the arguments of a launch in a record: the kernel's name, and the tensors passed to it."""
    return name_of(kernel_of(node)), list(launch_operands(node).values())


def launched_kernels(forward: ForwardCapture) -> list[str]:
    """Return the names of the kernels that a model launches itself."""
    graphs = [module.graph for module in forward.graph.modules() if isinstance(module, torch.fx.GraphModule)]
    nodes = [node for graph in graphs for node in graph.nodes if is_launch(node.target)]
    return list(dict.fromkeys(name_of(kernel_of(node)) for node in nodes))


def refuse_kernels_without_cpu(forward: ForwardCapture) -> None:
    """Refuse a program on CPUs with operators that have Triton kernels and no implementation for CPUs.

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


def refuse_launches(forward: ForwardCapture, *, grad: bool, compiled: bool) -> None:
    """Refuse a program whose model launches kernels itself, if no form of the program could run.

    Args:
        forward: the program.
        grad: whether it is for calls that record gradients.
        compiled: whether kernels for NVIDIA GPUs are compiled.

    Raises:
        ExportFailed: names the kernel.
    """
    for name in launched_kernels(forward):
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
