"""Functions of torch's library for Triton that the sources of kernels import."""

from typing import Any

from torch._inductor.runtime import triton_helpers


def replace_device_functions(functions: Any) -> None:
    """Replace NVIDIA's functions in torch's library."""
    triton_helpers.__dict__["libdevice"] = functions
