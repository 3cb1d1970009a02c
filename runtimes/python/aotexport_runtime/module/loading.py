"""`load`: from a directory to a module."""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import logging
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Literal, overload

from aotexport_runtime.bundle.digests import digests_compared
from aotexport_runtime.bundle.read import Bundle, open_bundle
from aotexport_runtime.bundle.signature import Signed, verify_signature
from aotexport_runtime.engines.candidates import CUDA, MODEL_ENGINES, ONNX, Request
from aotexport_runtime.engines.select import ENGINES, Choice, passed_over, select_targets
from aotexport_runtime.errors import NotSupported, first_line
from aotexport_runtime.schema.limits import DEFAULT, Limits
from aotexport_runtime.schema.manifest import Requirements
from aotexport_runtime.values.arguments import check_torch, check_type, names_of, why_unfit_interpreter
from aotexport_runtime.values.subclasses import TensorTypes

if TYPE_CHECKING:
    import torch

    from aotexport_runtime.engines.cuda.engine import CudaEngine
    from aotexport_runtime.engines.cuda.options import CudaRuntime
    from aotexport_runtime.engines.onnx.session import OnnxRuntime
    from aotexport_runtime.engines.openvino.session import OpenVino
    from aotexport_runtime.module.bundle_module import BundleModule
    from aotexport_runtime.module.onnx_module import OnnxModule

log = logging.getLogger("aotexport_runtime")


@overload
def load(
    path: str | os.PathLike[str] | Bundle,
    *,
    target: Literal["onnx", "openvino"],
    check_digests: bool = True,
    onnx: OnnxRuntime | None = None,
    openvino: OpenVino | None = None,
    device: None = None,
    trust: Literal["data", "native"] | Signed = "data",
    limits: Limits | None = None,
) -> OnnxModule: ...


@overload
def load(
    path: str | os.PathLike[str] | Bundle,
    *,
    device: torch.device | str | None = None,
    target: str = "auto",
    trust: Literal["data", "native"] | Signed = "data",
    mapped: bool | None = None,
    memory_budget: float = 1,
    matmul: Literal["fastest", "onednn", "torch"] | None = None,
    check_digests: bool = True,
    operator_namespaces: str | Iterable[str] = (),
    tensor_types: Iterable[type] | Mapping[str, type] = (),
    cuda: CudaRuntime | None = None,
    limits: Limits | None = None,
    dtype: torch.dtype | None = None,
    taps: Iterable[str] = (),
    frozen: bool = False,
) -> BundleModule: ...


def load(
    path: str | os.PathLike[str] | Bundle,
    *,
    device: torch.device | str | None = None,
    target: str = "auto",
    trust: Literal["data", "native"] | Signed = "data",
    mapped: bool | None = None,
    memory_budget: float = 1,
    matmul: Literal["fastest", "onednn", "torch"] | None = None,
    check_digests: bool = True,
    operator_namespaces: str | Iterable[str] = (),
    tensor_types: Iterable[type] | Mapping[str, type] = (),
    cuda: CudaRuntime | None = None,
    onnx: OnnxRuntime | None = None,
    openvino: OpenVino | None = None,
    limits: Limits | None = None,
    dtype: torch.dtype | None = None,
    taps: Iterable[str] = (),
    frozen: bool = False,
) -> BundleModule | OnnxModule:
    """Load the bundle at `path` as a module that behaves like the exported one.

    Args:
        path: directory of the bundle; or the open bundle, whose records are then read once for all of its loads.
        device: where to put parameters, buffers and new tensors; None: where the bundle was captured.
        target: `auto`, or the name of an engine (`cpu`, `portable`, `autograd`, `cuda`, `onnx`, `openvino`),
            or of a compiled target of the bundle (`cpu-x86_64-v3`).
        trust: `data`: nothing but data is read, and only operators of the allow-list run. `native`: native files whose
            digest matches the manifest may be loaded as well. `Signed(...)`: the bundle must be as its
            signer left it, and its native files may be loaded as well.
        mapped: map weights into memory: processes that load one bundle share them, and nobody may write into its files
            or truncate them, which would change the weights or end the process; False: read them, so that files may
            change or go; None: map the files that nobody can change (fs-verity, or immutable), read the others.
        memory_budget: most memory of the saved tensors of programs that record gradients, as a part of the whole, from
            0 to 1; backward recomputes the rest, as far as it can. Below 1 these programs run as `portable`.
        matmul: how float32 matrices are multiplied on processors. `fastest`: by the library that is the faster one
            for a matmul, measured at its first call and kept in the user's cache folder; `torch`: as operators of
            torch do, bit by bit; `onednn`: always by oneDNN, where it can. None: by the environment variable
            `AOTEXPORT_MATMUL`, else `fastest`.
        check_digests: compare every file with its SHA-256 in the manifest.
        operator_namespaces: namespaces of custom operators that the bundle may call; the packages that register
            them must be imported.
        tensor_types: classes of tensors (with `__tensor_flatten__`), and of objects in their contexts, that the bundle
            may make; or classes by the names that the bundle has for them, `module:qualified.name`.
        cuda: how kernels run on NVIDIA GPUs: tuning, CUDA graphs, comparison on the first call; None: the defaults.
        onnx: of target `onnx`: providers, threads and session options; None: the CPU, with torch's number of threads.
        openvino: of target `openvino`: threads and properties; None: torch's number of threads.
        limits: the most that the bundle may ask for, in reading and in calls; None: the defaults of `Limits`, or those
            that the open bundle has.
        dtype: `bfloat16`, `float16`, `float32` or `float64`: cast parameters and floating buffers, and take floating
            arguments in it, as `model.to(dtype)` does. Calls run the forward graph, to eager's bits. Code that chose
            its way at export by a dtype (`if x.dtype == ...`) went the way of the dtype at export.
        taps: paths of submodules. Every call returns a pair: the model's result, and a dict with the result of
            each of these submodules by its path, in the order of `taps`; a list of results for one that the program
            calls several times. Calls run the forward graph, and gradients flow through the results.
        frozen: the caller leaves the weights as they are. Of the engines that can serve a program without gradients,
            also those that hold copies of weights (ONNX models), `auto` then chooses the fastest: measured at the
            program's first call, and kept in the user's cache folder (`AOTEXPORT_MEASURE=0`: not). A weight that
            changes all the same is noticed by its version, which writes through `.data` do not raise; engines that
            read it then serve.

    Returns:
        The module, in the mode that the original was in at export; of targets `openvino` and `onnx`, which `auto`
        chooses where torch is not installed, a callable that is in evaluation mode and no `nn.Module`.

    Raises:
        ArgumentInvalid: an argument is of a wrong type.
        BundleInvalid: not a bundle, broken, tampered with, or hostile.
        BundleTooNew: written for a newer runtime.
        NotSupported: needs an operator, dtype, device or target that is not here, or torch, and it is not installed; or
            a program holds a dtype of its own, so that `dtype` cannot be taken; or Python runs without its global
            interpreter lock.
    """
    _check_arguments(target, trust, memory_budget, check_digests)
    if reason := why_unfit_interpreter():
        raise NotSupported(reason)
    bundle = path if isinstance(path, Bundle) else open_bundle(path, check_digests=False, limits=limits or DEFAULT)
    if isinstance(path, Bundle) and limits not in (None, path.limits):
        raise NotSupported("an open bundle has its limits: give them to `open_bundle`")
    if isinstance(trust, Signed):
        verify_signature(bundle, trust)
        trust = "native"
    taps = names_of("taps", taps)
    if target == "auto" and bundle.manifest.onnx and importlib.util.find_spec("torch") is None:
        target = ONNX
    options = {"onnx": onnx, "openvino": openvino}
    for name, given in options.items():
        if given is not None and name != target:
            raise NotSupported(f"`{name}` is for target `{name}`, not `{target}`")
    if target in MODEL_ENGINES:
        if dtype is not None or taps:
            raise NotSupported(
                f"target `{target}` takes neither `dtype` nor `taps`: its programs are ONNX models of their own"
            )
        with digests_compared(bundle) if check_digests else contextlib.nullcontext():
            return _load_models(bundle, target, device, options[target])
    check_torch(f"target `{target}`")
    from aotexport_runtime.bundle.weights import parts_of
    from aotexport_runtime.execution.codegen import Environment
    from aotexport_runtime.execution.matmul.sizes import mode_of
    from aotexport_runtime.execution.ops import check_operators
    from aotexport_runtime.module.bundle_module import BundleModule
    from aotexport_runtime.module.cast import cast_bundle, stored_state

    if check_digests:
        # Weights that are not mapped are compared when they are read.
        weights = {part.file for entry in bundle.manifest.state for part in parts_of(entry)}
        bundle.check_files(read_later=() if mapped else weights)
    namespaces, types = frozenset(names_of("operator_namespaces", operator_namespaces)), TensorTypes(tensor_types)
    _check_needs(bundle.manifest.requirements, namespaces, types)
    request = Request(target=target, trust=trust, memory_budget=memory_budget, frozen=frozen and dtype is None)
    bundle = bundle if dtype is None else cast_bundle(bundle, dtype)
    check_operators(bundle.read_graphs(), namespaces)
    place, targets, lowering = _resolved(bundle, request, device, cuda)
    passed = passed_over(targets, target)
    if passed or targets.native:
        log.info("target %s%s", targets.native or target, passed)
    environment = Environment(
        namespaces, place, types, lowering, memory_budget=memory_budget, matmul=mode_of(matmul), limits=bundle.limits
    )
    tensors = stored_state(bundle, environment.form, mapped=mapped)
    keep_freed_memory()
    module = BundleModule(bundle, tensors, environment=environment, request=request, targets=targets, taps=taps)
    if place is not None:
        module.to(place)
    for name in bundle.program_names:
        for refusal in bundle.program(name).refusals:
            log.info("program %s runs its forward graph: no %s graph (%s)", name, refusal.graph, refusal.reason)
    return module


def check_target(bundle: Bundle, target: str, trust: str, device: torch.device | str | None) -> None:
    """Refuse a requested target that cannot run here; nothing is loaded. Arguments as of `load`.

    Raises:
        NotSupported: says why.
    """
    _check_name(target)
    _resolved(bundle, Request(target=target, trust=trust), device, None)


def _check_arguments(
    target: str, trust: Literal["data", "native"] | Signed, memory_budget: float, check_digests: bool
) -> None:
    """Refuse arguments of `load` that no bundle can be loaded with."""
    check_type("target", target, str, "the name of a target")
    check_type("memory_budget", memory_budget, (int, float), "a number from 0 to 1")
    _check_name(target)
    if not isinstance(trust, Signed) and trust not in ("data", "native"):
        raise NotSupported(f"no trust tier `{trust}`; there are data, native and Signed(...)")
    if isinstance(trust, Signed) and not check_digests:
        raise NotSupported("a signature is one of digests: leave check_digests to its default")
    if not 0 <= memory_budget <= 1:
        raise NotSupported(f"no memory budget {memory_budget}; it is a part of what is saved otherwise, from 0 to 1")


def _check_name(target: str) -> None:
    if target not in ("auto", *ENGINES) and not target.startswith("cpu-"):
        raise NotSupported(f"no target `{target}`; there are auto, {', '.join(ENGINES)}")


def _resolved(
    bundle: Bundle, request: Request, device: torch.device | str | None, cuda: CudaRuntime | None
) -> tuple[torch.device | None, Choice, CudaEngine | None]:
    """Return the device (None: that of the capture), native code for this machine, and the engine of kernels."""
    from aotexport_runtime.engines.cpu.engine import unfit

    if request.target == CUDA and device is None:
        device = CUDA
    targets = select_targets(
        bundle,
        request,
        device=None if device is None else str(device).partition(":")[0],
        why_unfit=lambda name: unfit(bundle.target(name).requirements),
    )
    try:
        place = _place(device)
    except NotSupported as error:
        raise NotSupported(f"target `cuda` cannot run: {error}" if request.target == CUDA else str(error)) from None
    lowering = _lowering(targets, cuda)
    if request.target == CUDA and lowering is not None:
        lowering.check(place)
    return place, targets, lowering


def _lowering(targets: Choice, options: CudaRuntime | None) -> CudaEngine | None:
    """Return the engine that runs programs on kernels; None: none may run."""
    if CUDA not in targets.engines:
        return None
    from aotexport_runtime.engines.cuda.engine import CudaEngine
    from aotexport_runtime.engines.cuda.options import CudaRuntime

    check_type("cuda", options, (CudaRuntime, type(None)), "a CudaRuntime")
    return CudaEngine(options or CudaRuntime())


def _load_models(bundle: Bundle, target: str, device: Any, options: OnnxRuntime | OpenVino | None) -> OnnxModule:
    if device is not None:
        choose = "choose providers, `onnx=OnnxRuntime(providers=[...])`" if target == ONNX else "it runs on processors"
        raise NotSupported(f"target `{target}` takes no device: {choose}")
    from aotexport_runtime.module.onnx_module import OnnxModule, runtime_of

    runtime = runtime_of(target)
    check_type(target, options, (type(runtime), type(None)), f"an {type(runtime).__name__}")
    return OnnxModule(bundle, options or runtime)


def _place(device: torch.device | str | None) -> torch.device | None:
    """Return `device` with its index."""
    if device is None:
        return None
    import torch

    try:
        return torch.empty(0, device=torch.device(device)).device
    except TypeError:
        check_type("device", device, (str, int, torch.device), "the name of a device")
        raise
    except (RuntimeError, AssertionError) as error:
        reason = first_line(error)
        raise NotSupported(f"no device `{device}` here: {reason}") from None


def _check_needs(requirements: Requirements, allowed: frozenset[str], types: TensorTypes) -> None:
    """Refuse a bundle that needs other namespaces of operators, or classes of tensors, than the caller allows."""
    missing = [name for name in requirements.operator_namespaces if name not in allowed]
    listed = ", ".join(f"`{name}`" for name in missing)
    if missing:
        imports = "; ".join(f"import {module}" for module in requirements.operator_modules)
        how = f"Write `{imports}`" if imports else "Import the package that registers them"
        raise NotSupported(
            f"the bundle calls custom operators of {listed}, which the caller did not allow. {how} first, and pass "
            f"`operator_namespaces={missing}` to `load`"
        )
    missing = types.missing(requirements.tensor_types)
    listed = ", ".join(f"`{name}`" for name in missing)
    if missing:
        imports = "; ".join(f"from {m} import {q.partition('.')[0]}" for m, _, q in (n.partition(":") for n in missing))
        names = ", ".join(name.partition(":")[2] for name in missing)
        is_all = len(missing) == len(requirements.tensor_types)
        how = f"pass `tensor_types=[{names}]` to `load`" if is_all else f"add {names} to the `tensor_types` of `load`"
        raise NotSupported(
            f"the bundle holds tensors of {listed}, which the caller did not give. Write `{imports}`, and {how}"
        )


KEPT_NBYTES = 256 << 20
"""Most freed memory that glibc keeps; after a call, no more than the call has used."""

_LARGEST_MAPPED_NBYTES = 32 << 20
"""Size of blocks from which on glibc always maps them and gives them back; the most that glibc accepts."""

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""Parameters of `mallopt`, of glibc's `malloc.h`."""

_OWN_CHOICES = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_TOP_PAD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")
"""Environment variables by which a user configures the allocator."""


def keep_freed_memory() -> None:
    """Let glibc reuse the memory that calls free, instead of giving it back, unless the user configured it."""
    if sys.platform != "linux" or any(name in os.environ for name in _OWN_CHOICES):
        return
    # Other C libraries of Linux have no such function.
    mallopt: Callable[[int, int], int] | None = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        # Setting one alone would leave the other at a start value that is far too low.
        mallopt(_MMAP_THRESHOLD, _LARGEST_MAPPED_NBYTES)
        mallopt(_TRIM_THRESHOLD, KEPT_NBYTES)
