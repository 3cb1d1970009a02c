"""`load`: from a directory to a module."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import logging
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, ParamSpec, Protocol, overload

from aotexport_runtime.bundle.read import Bundle, open_bundle
from aotexport_runtime.engines.candidates import CUDA, MODEL_ENGINES, ONNX, Request
from aotexport_runtime.engines.select import ENGINES, Choice, passed_over, select_targets
from aotexport_runtime.errors import NotSupported, first_line
from aotexport_runtime.execution.allocator import keep_freed_memory
from aotexport_runtime.schema.limits import DEFAULT, Limits
from aotexport_runtime.schema.manifest import Requirements
from aotexport_runtime.values.arguments import check_torch, check_type, keywords_of, names_of, why_unfit_interpreter
from aotexport_runtime.values.subclasses import TensorTypes

if TYPE_CHECKING:
    import torch

    from aotexport_runtime.bundle.signature import Signed
    from aotexport_runtime.engines.cuda import CudaRuntime
    from aotexport_runtime.engines.cuda.engine import CudaEngine
    from aotexport_runtime.engines.onnx.session import OnnxRuntime
    from aotexport_runtime.engines.openvino.session import OpenVino
    from aotexport_runtime.module.bundle_module import BundleModule
    from aotexport_runtime.module.onnx_module import OnnxModule

log = logging.getLogger("aotexport_runtime")
_Fields = ParamSpec("_Fields")


Source = str | os.PathLike[str] | Bundle
"""The directory of a bundle, or the open bundle, whose records are then read once for all of its loads."""


@dataclass(frozen=True, kw_only=True)
class LoadOptions:
    """How a bundle is loaded: the keywords of `load`.

    Attributes:
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
            read it then serve. `bfloat16`: layers of float32 compute in bfloat16, which takes
            processors that have its instructions (AVX-512, AMX) about half of the time; `explain()` tells the error
            in the recorded calls.
    """

    device: torch.device | str | None = None
    target: str = "auto"
    trust: Literal["data", "native"] | Signed = "data"
    mapped: bool | None = None
    memory_budget: float = 1
    matmul: Literal["fastest", "onednn", "torch"] | None = None
    check_digests: bool = True
    operator_namespaces: str | Iterable[str] = ()
    tensor_types: Iterable[type] | Mapping[str, type] = ()
    cuda: CudaRuntime | None = None
    onnx: OnnxRuntime | None = None
    openvino: OpenVino | None = None
    limits: Limits | None = None
    dtype: torch.dtype | None = None
    taps: str | Iterable[str] = ()
    frozen: bool | Literal["bfloat16"] = False

    def __post_init__(self) -> None:
        """Refuse options that no bundle can be loaded with (`ArgumentInvalid`, `NotSupported`)."""
        check_type("target", self.target, str, "the name of a target")
        check_type("memory_budget", self.memory_budget, (int, float), "a number from 0 to 1")
        if self.target not in ("auto", *ENGINES) and not self.target.startswith("cpu-"):
            raise NotSupported(f"no target `{self.target}`; there are auto, {', '.join(ENGINES)}")
        trust: Any = self.trust
        if trust not in ("data", "native"):
            from aotexport_runtime.bundle.signature import Signed

            if not isinstance(trust, Signed):
                raise NotSupported(f"no trust tier `{self.trust}`; there are data, native and Signed(...)")
            if not self.check_digests:
                raise NotSupported("a signature is one of digests: leave check_digests to its default")
        if not 0 <= self.memory_budget <= 1:
            budget = f"no memory budget {self.memory_budget}"
            raise NotSupported(f"{budget}; it is a part of what is saved otherwise, from 0 to 1")
        if self.frozen not in (False, True, "bfloat16"):
            raise NotSupported(f"no precision `{self.frozen}` of frozen weights; there is bfloat16")
        for name in ("operator_namespaces", "taps"):
            object.__setattr__(self, name, names_of(name, getattr(self, name)))

    def verified(self, bundle: Bundle) -> LoadOptions:
        """Return the options with a tier of trust, once the signature that they ask for is verified."""
        if isinstance(self.trust, str):
            return self
        from aotexport_runtime.bundle.signature import verify_signature

        verify_signature(bundle, self.trust)
        return replace(self, trust="native")


class _Load(Protocol[_Fields]):
    """Type of `load`."""

    @overload
    def __call__(self, path: Source, *, target: Literal["onnx", "openvino"], **options: Any) -> OnnxModule: ...
    @overload
    def __call__(self, path: Source, *args: _Fields.args, **options: _Fields.kwargs) -> BundleModule: ...


def _taking(options: Callable[_Fields, LoadOptions]) -> Callable[[Callable[..., Any]], _Load[_Fields]]:
    return keywords_of(options)


@_taking(LoadOptions)
def load(path: Source, options: LoadOptions) -> BundleModule | OnnxModule:
    """Load the bundle at `path` as a module that behaves like the exported one.

    Args:
        path: directory of the bundle; or the open bundle, whose records are then read once for all of its loads.
        options: as keywords, see below.

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
    if reason := why_unfit_interpreter():
        raise NotSupported(reason)
    limits = options.limits
    bundle = path if isinstance(path, Bundle) else open_bundle(path, check_digests=False, limits=limits or DEFAULT)
    if isinstance(path, Bundle) and limits not in (None, path.limits):
        raise NotSupported("an open bundle has its limits: give them to `open_bundle`")
    options = options.verified(bundle)
    if options.target == "auto" and bundle.manifest.onnx and importlib.util.find_spec("torch") is None:
        options = replace(options, target=ONNX)
    for name in MODEL_ENGINES:
        if getattr(options, name) is not None and name != options.target:
            raise NotSupported(f"`{name}` is for target `{name}`, not `{options.target}`")
    return load_models(bundle, options) if options.target in MODEL_ENGINES else load_module(bundle, options)


def load_module(bundle: Bundle, options: LoadOptions) -> BundleModule:
    """Return the module of an open bundle, by torch; see `load`, which has compared options and signature."""
    check_torch(f"target `{options.target}`")
    from aotexport_runtime.bundle.weights import load_tensors, parts_of
    from aotexport_runtime.execution.codegen import Environment
    from aotexport_runtime.execution.matmul.sizes import mode_of
    from aotexport_runtime.execution.ops import check_operators
    from aotexport_runtime.module.bundle_module import BundleModule
    from aotexport_runtime.submodules.tables import of_one_version

    if options.check_digests:
        # Weights are compared when they are read, several files at a time.
        bundle.check_files(read_later={part.file for entry in bundle.manifest.state for part in parts_of(entry)})
    namespaces, types = frozenset(options.operator_namespaces), TensorTypes(options.tensor_types)
    _check_needs(bundle.manifest.requirements, namespaces, types)
    if options.dtype is not None:
        from aotexport_runtime.module.cast import CastBundle

        bundle = CastBundle(bundle, options.dtype)
    check_operators(bundle.read_graphs(), namespaces)
    request, place, targets, lowering = check_target(bundle, options)
    passed = passed_over(targets, options.target)
    if passed or targets.native:
        log.info("target %s%s", targets.native or options.target, passed)
    environment = Environment(
        namespaces,
        place,
        types,
        lowering,
        memory_budget=options.memory_budget,
        matmul=mode_of(options.matmul),
        limits=bundle.limits,
    )
    # Of a `CastBundle`: its own.
    load_state = getattr(bundle, "load_state", functools.partial(load_tensors, bundle, bundle.manifest.state))
    tensors = load_state(environment.form, mapped=options.mapped)
    keep_freed_memory()
    version = of_one_version(tensors) if request.frozen and _only_infers(bundle) else None
    module = BundleModule(
        bundle,
        tensors,
        environment=environment,
        request=request,
        targets=targets,
        taps=[*options.taps],
        version=version,
    )
    if place is not None:
        module.to(place)
    for name in bundle.program_names:
        for refusal in bundle.program(name).refusals:
            log.info("program %s runs its forward graph: no %s graph (%s)", name, refusal.graph, refusal.reason)
    return module


def _only_infers(bundle: Bundle) -> bool:
    """Return whether no program records gradients, or writes to state."""
    for name in bundle.program_names:
        program = bundle.program(name)
        functional = program.functional
        if functional is None or program.grad or program.rebinds or functional.mutations or functional.version_rises:
            return False
    return True


def load_models(bundle: Bundle, options: LoadOptions) -> OnnxModule:
    """Return the module of an open bundle, by its ONNX models; see `load`."""
    from aotexport_runtime.module.onnx_module import OnnxModule, runtime_of

    target, runtime = options.target, runtime_of(options.target)
    if options.dtype is not None or options.taps:
        raise NotSupported(
            f"target `{target}` takes neither `dtype` nor `taps`: its programs are ONNX models of their own"
        )
    if options.device is not None:
        choose = "choose providers, `onnx=OnnxRuntime(providers=[...])`" if target == ONNX else "it runs on processors"
        raise NotSupported(f"target `{target}` takes no device: {choose}")
    given = getattr(options, target)
    check_type(target, given, (type(runtime), type(None)), f"an {type(runtime).__name__}")
    with bundle.files_checked() if options.check_digests else contextlib.nullcontext():
        return OnnxModule(bundle, given or runtime)


def check_target(
    bundle: Bundle, options: LoadOptions
) -> tuple[Request, torch.device | None, Choice, CudaEngine | None]:
    """Return the request, the device (None: of the capture), native code for this machine, the engine of kernels.

    Raises:
        NotSupported: the requested target cannot run here; nothing is loaded.
    """
    import torch

    def why_unfit(name: str) -> str | None:
        from aotexport_runtime.engines.cpu.engine import unfit

        return unfit(bundle.target(name).requirements)

    is_cuda = options.target == CUDA
    device = CUDA if is_cuda and options.device is None else options.device
    request = Request(
        target=options.target,
        trust=str(options.trust),
        memory_budget=options.memory_budget,
        frozen=options.dtype is None and options.frozen,
    )
    targets = select_targets(
        bundle, request, device=None if device is None else str(device).partition(":")[0], why_unfit=why_unfit
    )
    try:
        # With its index.
        place = None if device is None else torch.empty(0, device=torch.device(device)).device
    except TypeError:
        check_type("device", device, (str, int, torch.device), "the name of a device")
        raise
    except (RuntimeError, AssertionError) as error:
        needed = "target `cuda` cannot run: " if is_cuda else ""
        raise NotSupported(f"{needed}no device `{device}` here: {first_line(error)}") from None
    if CUDA not in targets.engines:
        return request, place, targets, None
    from aotexport_runtime.engines.cuda import CudaRuntime
    from aotexport_runtime.engines.cuda.engine import CudaEngine

    check_type("cuda", options.cuda, (CudaRuntime, type(None)), "a CudaRuntime")
    lowering = CudaEngine(options.cuda or CudaRuntime())
    if is_cuda:
        lowering.check(place)
    return request, place, targets, lowering


def _check_needs(requirements: Requirements, allowed: frozenset[str], types: TensorTypes) -> None:
    """Refuse a bundle that needs other namespaces of operators, or classes of tensors, than the caller allows."""
    if missing := [name for name in requirements.operator_namespaces if name not in allowed]:
        imports = "; ".join(f"import {module}" for module in requirements.operator_modules)
        how = f"Write `{imports}`" if imports else "Import the package that registers them"
        raise NotSupported(
            f"the bundle calls custom operators of {_listed(missing)}, which the caller did not allow. {how} first, "
            f"and pass `operator_namespaces={missing}` to `load`"
        )
    if missing := types.missing(requirements.tensor_types):
        imports = "; ".join(f"from {m} import {q.partition('.')[0]}" for m, _, q in (n.partition(":") for n in missing))
        names = ", ".join(name.partition(":")[2] for name in missing)
        is_all = len(missing) == len(requirements.tensor_types)
        how = f"pass `tensor_types=[{names}]` to `load`" if is_all else f"add {names} to the `tensor_types` of `load`"
        raise NotSupported(
            f"the bundle holds tensors of {_listed(missing)}, which the caller did not give. "
            f"Write `{imports}`, and {how}"
        )


def _listed(names: list[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)
