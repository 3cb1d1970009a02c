"""The systems that are measured, one file each.

A system names what it writes ahead of time (`prepare`) and how a process gets a callable module from that (`load`);
everything that is measured is made of these two. A new system is a new file, and its line in `SYSTEMS`.
"""

from benchmarks.systems.aot_inductor import AOT_INDUCTOR
from benchmarks.systems.bundle import AUTO, AUTOGRAD, BFLOAT16, CPU, FROZEN, ONNX, OPENVINO, PORTABLE
from benchmarks.systems.eager import EAGER
from benchmarks.systems.generation import COMPILED_CACHE, DYNAMIC_CACHE, GENERATE, STATIC_CACHE
from benchmarks.systems.interface import Prepared, System
from benchmarks.systems.onnx_runtime import ONNX_RUNTIME, OPENVINO_PEER
from benchmarks.systems.steps import FUSED, STEP, STEP_CPU, STEP_ONNX
from benchmarks.systems.torch_compile import AOT_COMPILE, TORCH_COMPILE
from benchmarks.systems.torch_export import EXPORTED_MODULE, TORCH_EXPORT, TORCH_GRAPHS

_OURS = (PORTABLE, CPU, AUTOGRAD, AUTO, ONNX, OPENVINO, FROZEN, BFLOAT16)
_PEERS = (
    EXPORTED_MODULE,
    TORCH_COMPILE,
    AOT_COMPILE,
    AOT_INDUCTOR,
    ONNX_RUNTIME,
    OPENVINO_PEER,
    TORCH_EXPORT,
    TORCH_GRAPHS,
)
_GENERATING = (DYNAMIC_CACHE, STATIC_CACHE, COMPILED_CACHE, GENERATE)
_STEPPING = (FUSED, STEP, STEP_CPU, STEP_ONNX)

SYSTEMS: dict[str, System] = {system.name: system for system in (EAGER, *_OURS, *_PEERS, *_GENERATING, *_STEPPING)}
"""Every system, by name, in the order of the tables."""

__all__ = ["SYSTEMS", "Prepared", "System"]
