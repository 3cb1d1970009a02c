"""The private names of torch's compiler that lowering to GPU kernels uses; written for torch 2.13.

Importing torch's compiler takes seconds, so this file is imported only when a bundle is lowered.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import tempfile
import types
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch._inductor.codegen.common as codegen_common
import torch._inductor.config as inductor_config
import torch._inductor.runtime.triton_helpers as triton_helpers
import torch._inductor.runtime.triton_heuristics as triton_heuristics
import torch._inductor.utils as inductor_utils
import torch.fx.traceback
import torch.utils._triton as triton_utils
from torch._dynamo.device_interface import CudaInterface, device_interfaces, init_device_reg
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._guards import TracingContext, tracing
from torch._inductor.codegen.common import FileBackedGraphModule
from torch._inductor.codegen.wrapper import SymbolicCallArg, WrapperLine
from torch._inductor.codegen.wrapper_fxir import FxConverter, WrapperFxCodegen
from torch._inductor.ir import IRNode, NonOwningLayout
from torch._inductor.runtime.hints import DeviceProperties
from torch._inductor.runtime.triton_helpers import get_constexprs
from torch._inductor.runtime.triton_heuristics import CachingAutotuner, GridExpr
from torch._inductor.utils import convert_to_symint
from torch._inductor.virtualized import V
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from aotexport.process.patches import Patch, patched
from aotexport.torch_internals.compiler import decompositions, pools_by_torch, wide_negative_integers
from aotexport.torch_internals.launches import DEVICE, triton_target

with warnings.catch_warnings():
    # This import uses names that torch itself has deprecated.
    warnings.simplefilter("ignore", DeprecationWarning)
    from torch._inductor.compile_fx import _recursive_joint_graph_passes, compile_fx_inner

__all__ = [
    "CachingAutotuner",
    "FileBackedGraphModule",
    "FxConverter",
    "GridExpr",
    "IRNode",
    "NonOwningLayout",
    "SymbolicCallArg",
    "WrapperFxCodegen",
    "WrapperLine",
    "convert_to_symint",
    "get_constexprs",
]

SETTINGS: dict[str, Any] = {
    "fx_wrapper": True,
    "compile_threads": 1,
    "fx_graph_cache": False,
    "fx_graph_remote_cache": False,
    "triton.autotune_at_compile_time": False,
    "triton.cudagraphs": False,
    "autotune_local_cache": False,
    # These would run operators on real tensors to measure or fold them.
    "shape_padding": False,
    "joint_graph_constant_folding": False,
    # Checks come as text, for which a graph has no node; the runtime makes its own.
    "size_asserts": False,
    "alignment_asserts": False,
    "scalar_asserts": False,
    "nan_asserts": False,
    # Triton itself passes Python floats so.
    "_use_fp64_for_unbacked_floats": False,
    # Gradients are returned in the layout of the traced graph, like outputs.
    "bw_outputs_user_visible": True,
}
"""Settings of the compiler while it lowers."""


@contextlib.contextmanager
def offline_gpu(wrapper: type[WrapperFxCodegen]) -> Iterator[None]:
    """Let torch's compiler generate code for `DEVICE` on a machine without one; kernels are not compiled.

    `wrapper` turns the compiler's program into a graph.
    """
    codegen_common.init_backend_registration()
    init_device_reg()
    with contextlib.ExitStack() as stack:
        stack.callback(_forget_devices)
        stack.enter_context(patched(*_device_answers(wrapper)))
        stack.enter_context(triton_target())
        stack.enter_context(cuda_guard())
        stack.enter_context(inductor_config.patch(SETTINGS))
        stack.enter_context(pools_by_torch())
        stack.enter_context(wide_negative_integers())
        scratch = stack.enter_context(tempfile.TemporaryDirectory(prefix="aotexport-lower-"))
        folder = Patch(os.environ, "TORCHINDUCTOR_CACHE_DIR", scratch, "Keep the compiler's files apart")
        stack.enter_context(patched(folder))
        _forget_devices()
        yield


def _device_answers(wrapper: type[WrapperFxCodegen]) -> list[Patch]:
    """Return patches of torch's queries to a device and its driver."""
    answers: list[tuple[Any, str, Any]] = [
        (torch.cuda, "get_device_properties", constant(DEVICE)),
        (torch.cuda, "get_device_capability", constant((DEVICE.major, DEVICE.minor))),
        (torch.cuda, "current_device", constant(0)),
        (torch.cuda, "device_count", constant(1)),
        # With NVML's check, which Lightning asks for, it would be told from the count, and the driver be called.
        (torch.cuda, "is_available", constant(torch.cuda.is_available())),
        (triton_helpers, "set_driver_to_gpu", constant(None)),
    ]
    if not hasattr(torch._C, "_cuda_getCurrentRawStream"):
        answers.append((torch._C, "_cuda_getCurrentRawStream", constant(0)))
    of_compiler = {
        **dict.fromkeys(("current_device", "exchange_device", "maybe_exchange_device", "get_raw_stream"), 0),
        "device_count": 1,
        "is_available": True,
        "is_bf16_supported": True,
        "memory_allocated": 0,
        "get_device_properties": DEVICE,
        "set_device": None,
        "synchronize": None,
    }
    answers += [(CudaInterface, name, staticmethod(constant(value))) for name, value in of_compiler.items()]
    answers.append((CudaInterface.Worker, "get_device_properties", staticmethod(constant(DEVICE))))
    answers.append((device_interfaces, "cuda:0", CudaInterface))
    answered = [Patch(owner, name, answer, "Answer for a GPU that is not there") for owner, name, answer in answers]
    plugins, codegen = constant([_Uncompiled()]), codegen_common.device_codegens["cuda"]
    return [
        *answered,
        Patch(triton_heuristics, "get_caching_autotuner_plugins", plugins, "Leave compiling kernels to later"),
        Patch(codegen, "fx_wrapper_codegen", wrapper, "Take the compiler's program as a graph"),
    ]


def constant(value: Any) -> Callable[..., Any]:
    """Return a function that returns `value` for any arguments."""
    return lambda *args, **kwargs: value


class _Uncompiled:
    """A plugin of the compiler's autotuner that leaves compiling kernels to later."""

    def pre_compile(self, tuner: Any) -> None:
        if not tuner.compile_results:
            tuner.compile_results = [types.SimpleNamespace(config=config, kernel=None) for config in tuner.configs]


_CUDA, _META, _DEVICE_TYPES = 1, 14, 22
"""Positions in c10's registry of device guards (`c10/core/DeviceType.h`)."""


@contextlib.contextmanager
def cuda_guard() -> Iterator[None]:
    """Give fake CUDA tensors the device guard of meta tensors, which does nothing; a build with CUDA keeps its own.

    Raises:
        RuntimeError: this build of torch has another registry of guards.
    """
    registry = _guard_registry()
    before = registry[_CUDA]
    if not registry[_META]:
        raise RuntimeError("torch's registry of device guards is not as expected")
    if not before:
        registry[_CUDA] = registry[_META]
    try:
        yield
    finally:
        registry[_CUDA] = before


def _guard_registry() -> Any:
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    return (ctypes.c_void_p * _DEVICE_TYPES).in_dll(library, "_ZN3c104impl26device_guard_impl_registryE")


def _forget_devices() -> None:
    """Empty the caches that hold devices, or kernels made for them."""
    inductor_utils.clear_caches()
    DeviceProperties.create.cache_clear()
    for value in (*vars(inductor_utils).values(), *vars(triton_utils).values()):
        if isinstance(value, functools._lru_cache_wrapper):
            value.cache_clear()


aten: Any = torch.ops.aten
_NORMAL = (aten.normal.Tensor_Tensor, aten.normal.Tensor_float, aten.normal.float_Tensor)


def _normal(mean: Any, std: Any, generator: Any = None) -> torch.Tensor:
    """Return normal random numbers; torch's own decomposition uses an operator that no bundle may call."""
    like = mean * std
    return mean + std * torch.randn(like.shape, dtype=like.dtype, device=like.device)


def rounding_as_eager(dtypes: Iterable[torch.dtype]) -> contextlib.AbstractContextManager[None]:
    """Round fused values as eager does while they are traced and lowered, if any of `dtypes` is of 16 bits.

    A backward that recomputes a maximum's operand, to find the place of the maximum, must find it to the bit. Programs
    of wider values stay as they are: this setting also keeps products and sums apart, which is slower.
    """
    return inductor_config.patch(emulate_precision_casts=any(dtype in _NARROW for dtype in dtypes))


_NARROW = (torch.bfloat16, torch.float16)


def retraced(function: Callable[..., Any], fakes: Sequence[Any], fake_mode: FakeTensorMode) -> torch.fx.GraphModule:
    """Trace a function of flat values on fake CUDA tensors, with the decompositions of torch's compiler."""
    table = {**decompositions(), **dict.fromkeys(_NORMAL, _normal)}
    with (
        cuda_guard(),
        tracing(TracingContext(fake_mode)),
        fake_mode,
        torch.no_grad(),
        # Without kernels for CUDA, autograd would decompose composite operators to others that work in place.
        torch._C._AutoDispatchBelowAutograd(),
        torch.fx.traceback.preserve_node_meta(),
    ):
        tracer = make_fx(function, tracing_mode="real", decomposition_table=table, _allow_non_fake_inputs=True)
        return tracer(*fakes)


def lowered_nodes() -> dict[str, torch.fx.Node]:
    """Return the nodes of the graph that the compiler is lowering, by name."""
    lowering: Any = V.graph
    return {node.name: node for node in lowering.graph.nodes}


def joint_passes(module: torch.fx.GraphModule, fake_mode: FakeTensorMode) -> None:
    """Run the compiler's passes for joint graphs; they turn random operators into seeded ones."""
    with tracing(TracingContext(fake_mode)), V.set_fake_mode(fake_mode), fake_mode:
        # Patterns are traced on tensors of this device, which must exist.
        _recursive_joint_graph_passes(module, input_device=torch.device("cpu"))


def partitioned(
    module: torch.fx.GraphModule, returned: int, fake_mode: FakeTensorMode
) -> tuple[torch.fx.GraphModule, torch.fx.GraphModule]:
    """Return forward and backward of a joint graph, cut where the least has to be saved.

    The names of its tangents contain `tangents`; the forward returns the first `returned` outputs.
    """
    with tracing(TracingContext(fake_mode)):
        return min_cut_rematerialization_partition(
            module, [], num_fwd_outputs=returned, static_lifetime_input_indices=[]
        )


def compile_for_gpu(
    module: torch.fx.GraphModule, fake_mode: FakeTensorMode, *, visible: int, is_backward: bool, is_inference: bool
) -> None:
    """Run the compiler on a forward or backward graph; the wrapper class in force gets the result.

    The graph is changed in place. Its first `visible` outputs keep the layout that they were traced with.
    """
    output = module.graph.output_node()
    values = output.args[0]
    assert isinstance(values, tuple | list)
    output.meta["user_visible_output_idxs"] = [
        index for index, value in enumerate(values[:visible]) if isinstance(value, torch.fx.Node)
    ]
    inputs = [node.meta["val"] for node in module.graph.find_nodes(op="placeholder")]
    with tracing(TracingContext(fake_mode)), torch.no_grad(), V.set_fake_mode(fake_mode):
        compile_fx_inner(
            module, inputs, is_backward=is_backward, is_inference=is_inference, fx_wrapper=True, cpp_wrapper=False
        )
