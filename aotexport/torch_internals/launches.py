"""Record launches of Triton kernels in traces, and set Triton's target device; torch's compiler is not imported."""

from __future__ import annotations

import contextlib
import os
import types
from typing import Any

import torch
from torch._higher_order_ops import triton_kernel_wrap

from aotexport.process.patches import Patch, patched

DEVICE = types.SimpleNamespace(
    name="NVIDIA A100",
    major=8,
    minor=0,
    multi_processor_count=108,
    regs_per_multiprocessor=65536,
    max_threads_per_multi_processor=2048,
    max_threads_per_block=1024,
    warp_size=32,
    total_memory=40 << 30,
    L2_cache_size=40 << 20,
    # The least opt-in limit of sm_80 to sm_120, so that every chosen block fits all of them.
    shared_memory_per_block=49152,
    shared_memory_per_block_optin=99 << 10,
    shared_memory_per_multiprocessor=100 << 10,
    gcnArchName="",
)
"""The device for heuristics of the compiler, with the names of torch's device properties: an A100.

Kernels are correct on every device; block sizes and splits are chosen for this one.
"""


LAUNCHES = (
    torch.ops.higher_order.triton_kernel_wrapper_mutation,
    torch.ops.higher_order.triton_kernel_wrapper_functional,
)
"""The targets of nodes that launch kernels."""


def triton_target() -> contextlib.AbstractContextManager[None]:
    """Let Triton compile for `DEVICE`."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    target = GPUTarget("cuda", DEVICE.major * 10 + DEVICE.minor, DEVICE.warp_size)
    answering = types.SimpleNamespace(get_current_target=lambda: target)
    return patched(
        Patch(driver, "_active", answering, "Name the device that Triton compiles for"),
        Patch(os.environ, "TRITON_DEFAULT_FP_FUSION", "1", "Set the option whose absence Triton 3.9 warns of"),
    )


def replace_device_functions(functions: Any) -> None:
    """Replace NVIDIA's functions in torch's library for Triton, which the sources of kernels import."""
    from torch._inductor.runtime import triton_helpers

    setattr(triton_helpers, "libdevice", functions)  # noqa: B010


def launch_recorded(kernel: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Record the launch of a kernel of `triton.jit` in the current trace; nothing is run.

    `args` and `kwargs` are those of its `run`, with `grid`.

    Raises:
        RuntimeError: torch cannot record it; says why.
    """
    wrapped: Any = torch.library.wrap_triton(kernel)
    wrapped.run(*args, **kwargs)


def kernel_of(node: torch.fx.Node) -> Any:
    """Return the kernel that a node launches."""
    index: Any = node.kwargs["kernel_idx"]
    return triton_kernel_wrap.kernel_side_table.get_kernel(index)


def launch_operands(node: torch.fx.Node) -> dict[str, torch.fx.Node]:
    """Return the tensors among the arguments of a launch, by the names of the kernel's parameters."""
    arguments: Any = node.kwargs["kwargs"]
    tensors = {name: value for name, value in arguments.items() if isinstance(value, torch.fx.Node)}
    return {name: value for name, value in tensors.items() if isinstance(value.meta.get("val"), torch.Tensor)}


def written_operands(node: torch.fx.Node) -> list[str]:
    """Return the parameters whose new contents a functional launch returns, in order."""
    cloned: Any = node.kwargs["tensors_to_clone"]
    return [name for name in launch_operands(node) if name in cloned]
