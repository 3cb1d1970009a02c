"""Precompiled kernels on NVIDIA GPUs: chosen for the device, loaded and launched through its driver.

Nothing here compiles, and nothing touches the driver before a program runs on a CUDA device.
"""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class CudaRuntime:
    """How kernels run.

    Attributes:
        tune: time the candidates of each kernel at its first launch, on copies of its arguments, and keep the fastest;
            False: the first candidate runs, which is the compiler's guess, and always the same.
        remember: keep the winners in the user's cache folder, for the next process.
        cuda_graphs: capture forward and backward as CUDA graphs where calls repeat with the same shapes, and replay
            them; results of a program are copied out of the graph's memory.
        verify: `first-call`: compare each program with its portable form on the first call that it serves, and run that
            form where they disagree; `never`: do not.
    """

    tune: bool = True
    remember: bool = True
    cuda_graphs: bool = False
    verify: Literal["first-call", "never"] = "first-call"
