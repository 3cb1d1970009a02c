"""Functions that the sources of kernels import from torch, inductor's own library for Triton."""

from typing import Any

from torch._inductor.runtime import triton_helpers


def replace_device_functions(functions: Any) -> None:
    """Give torch's library other functions in place of NVIDIA's."""
    triton_helpers.__dict__["libdevice"] = functions
