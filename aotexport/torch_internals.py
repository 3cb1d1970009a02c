"""The only file that imports torch's private names; written for torch 2.13.

Every name is here with what it is for. `tests/meta/test_torch_internals.py` fails with a clear message when torch
moves one.
"""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import torch
import torch.fx.traceback

# Constructors of tensor subclasses that torch marks, which record themselves while an export goes on.
from torch._export import wrappers

# Fake tensors with a shape environment that knows the user's dynamic dimensions.
from torch._export.non_strict_utils import make_fake_inputs

# The metadata that functional graphs come with.
from torch._functorch._aot_autograd.descriptors import TangentAOTInput
from torch._functorch._aot_autograd.schemas import (
    InputAliasInfo,
    MemoryFormatMeta,
    MutationType,
    OutputAliasInfo,
    OutputType,
    PlainTensorMeta,
    ViewAndMutationMeta,
)

# AOTAutograd's capture with descriptors: the route with torch.compile's full semantics.
from torch._functorch.aot_autograd import aot_export_joint_with_descriptors

# The tracing context tells AOTAutograd which fake mode and shape environment to go on with.
from torch._guards import TracingContext, tracing

# Custom operators with the functions that define them, to tell the user what to import.
from torch._library import simple_registry
from torch._library.custom_ops import OPDEFS
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental import proxy_tensor
from torch.fx.experimental.proxy_tensor import PythonKeyTracer, make_fx
from torch.fx.experimental.symbolic_shapes import ConstraintViolationError, ShapeEnv
from torch.fx.passes.runtime_assert import insert_deferred_runtime_asserts

# Containers that torch's tree utilities know and this package does not (caches of model libraries).
from torch.utils._pytree import SUPPORTED_NODES, tree_leaves, tree_map
from torch.utils._sympy.numbers import int_oo
from torch.utils._sympy.value_ranges import ValueRanges

from aotexport_runtime.subclasses import flatten, inner_tensor, is_wrapper, parts, protocol

# What nodes of a pre-dispatch graph call, beside operators.
OpOverload = torch._ops.OpOverload
HigherOrderOperator = torch._ops.HigherOrderOperator
SET_GRAD_ENABLED = torch._C._set_grad_enabled
ENTER_AUTOCAST = torch.amp.autocast_mode._enter_autocast
EXIT_AUTOCAST = torch.amp.autocast_mode._exit_autocast

__all__ = [
    "ENTER_AUTOCAST",
    "EXIT_AUTOCAST",
    "SET_GRAD_ENABLED",
    "SUPPORTED_NODES",
    "ConstraintViolationError",
    "FakeTensor",
    "FakeTensorMode",
    "FunctionalCapture",
    "HigherOrderOperator",
    "InputAliasInfo",
    "MemoryFormatMeta",
    "MutationType",
    "OpOverload",
    "OutputAliasInfo",
    "OutputType",
    "PlainTensorMeta",
    "ShapeEnv",
    "ViewAndMutationMeta",
    "applied_functions",
    "capture_functional",
    "custom_operator_module",
    "exporting",
    "has_transforms",
    "insert_data_dependent_checks",
    "is_wrap",
    "make_fake_inputs",
    "masks_unread",
    "onednn_disabled",
    "trace_forward",
    "tree_map",
    "within_subclass",
]


@contextlib.contextmanager
def exporting() -> Iterator[None]:
    """Let the model see that an export goes on (`torch.compiler.is_exporting()`), as `torch.export` does."""
    compiler = torch.compiler
    before = compiler._is_compiling_flag, compiler._is_exporting_flag
    compiler._is_compiling_flag = compiler._is_exporting_flag = True
    try:
        yield
    finally:
        compiler._is_compiling_flag, compiler._is_exporting_flag = before


@contextlib.contextmanager
def masks_unread() -> Iterator[None]:
    """Keep transformer layers from comparing a mask with the causal one, which branches on values.

    Where the two are equal the layers then use the mask, in place of the kernels' own causal one.
    """
    layers = torch.nn.modules.transformer
    original = layers._detect_is_causal_mask
    layers._detect_is_causal_mask = lambda mask, is_causal=None, size=None: is_causal is True
    try:
        yield
    finally:
        layers._detect_is_causal_mask = original


_WATCH = "_aotexport_applied"


@contextlib.contextmanager
def applied_functions(seen: Callable[[type], None]) -> Iterator[None]:
    """Call `seen` with the class of every custom autograd function that is applied.

    The code of `Function.apply` is exchanged, not the attribute: models bind the method beforehand (`apply = F.apply`).
    """
    apply = vars(torch.autograd.Function)["apply"].__func__
    original = FunctionType(apply.__code__, apply.__globals__, apply.__name__, apply.__defaults__, apply.__closure__)

    def watch(cls: type, *args: Any, **kwargs: Any) -> Any:
        seen(cls)
        return original(cls, *args, **kwargs)

    before = apply.__code__
    apply.__globals__[_WATCH] = watch
    apply.__code__ = _watched()
    try:
        yield
    finally:
        apply.__code__ = before
        del apply.__globals__[_WATCH]


def _watched() -> CodeType:
    """Return code that calls the watcher of `Function.apply`, with the free variable that the method has."""
    __class__ = torch.autograd.Function

    def apply(cls: type, *args: Any, **kwargs: Any) -> Any:
        assert __class__ is not None
        return _aotexport_applied(cls, *args, **kwargs)  # type: ignore[name-defined]  # noqa: F821

    return apply.__code__


@contextlib.contextmanager
def onednn_disabled() -> Iterator[None]:
    """Hide oneDNN from torch's choice of kernels, without the warnings of the public switch."""
    before = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(before)


@contextlib.contextmanager
def convolution_choice_unguarded(fake_mode: FakeTensorMode) -> Iterator[None]:
    """Let torch pick the kernel of a convolution without assuming anything about its sizes.

    The graph keeps the operator that picks anew at every call, so a guard such as `batch < 16` would be in vain.
    """
    choose = torch._C._select_conv_backend
    environment = fake_mode.shape_env

    def unguarded(*args: Any, **kwargs: Any) -> Any:
        with environment.suppress_guards() if environment is not None else contextlib.nullcontext():
            return choose(*args, **kwargs)

    torch._C._select_conv_backend = unguarded
    try:
        yield
    finally:
        torch._C._select_conv_backend = choose


def custom_operator_module(name: str) -> str | None:
    """Return the Python module that registered the custom operator `namespace::base.overload`, where torch knows."""
    definition = OPDEFS.get(name.partition(".")[0])
    return None if definition is None else getattr(definition._init_fn, "__module__", None)


def node_annotations() -> dict[str, Any]:
    """Return the mutable mapping whose entries the tracer copies to `node.meta['custom']` of new nodes."""
    return torch.fx.traceback.get_current_meta().setdefault("custom", {})


@contextlib.contextmanager
def _frames_kept(keeps: Callable[[str], bool]) -> Iterator[None]:
    """Record the frames below this package of files that `keeps` takes; torch keeps functions called `forward`."""
    original = PythonKeyTracer._filter_traceback_frames
    here = str(Path(__file__).parent)

    def calls_model(file: str) -> bool:
        return file.startswith(here) and file != __file__

    def frames(self: PythonKeyTracer, summary: traceback.StackSummary) -> traceback.StackSummary:
        last = max((i for i, frame in enumerate(summary) if calls_model(frame.filename)), default=-1)
        return traceback.StackSummary.from_list([f for f in summary[last + 1 :] if keeps(f.filename)])

    PythonKeyTracer._filter_traceback_frames = frames  # type: ignore[method-assign]
    try:
        yield
    finally:
        PythonKeyTracer._filter_traceback_frames = original  # type: ignore[method-assign]


def is_wrap(target: Any) -> bool:
    """Return whether a node's target makes a tensor subclass of plain tensors; its `meta['val']` says which."""
    return getattr(target, "_aotexport_wraps", False)


def _wrap_like(template: torch.Tensor) -> Callable[..., Any]:
    """Return a function that makes a tensor of the structure of `template` of plain tensors."""

    def made(like: torch.Tensor, given: Iterator[torch.Tensor]) -> torch.Tensor:
        if not is_wrapper(like):
            return next(given)
        inner, context = flatten(like)
        make = protocol(type(like))
        values = {name: made(value, given) for name, value in inner.items()}
        return make.unflatten(values, make.live(context), like.size(), like.stride())

    def wrapped(given: Sequence[torch.Tensor]) -> torch.Tensor:
        return made(template, iter(given))

    wrapped._aotexport_wraps = True  # type: ignore[attr-defined]
    return wrapped


class _Within:
    depth = 0


def within_subclass() -> bool:
    """Return whether an operator on a tensor subclass runs, whose code runs again in every call of the graph."""
    return _Within.depth > 0


@contextlib.contextmanager
def _subclasses_tracked() -> Iterator[None]:
    """Let a trace follow tensors into wrapper subclasses and out of them.

    Operators on a tensor subclass are recorded as they are, and run by its own code at run time. The code of a model,
    or of the class above operators (`__torch_function__`), may read the inner tensors and go on with them, and may make
    such tensors of others: nodes for both.
    """
    track, call = proxy_tensor.track_tensor, proxy_tensor.proxy_call

    def track_tensor(tensor: torch.Tensor, proxy: Any, *, constant: Any, tracer: Any) -> None:
        track(tensor, proxy, constant=constant, tracer=tracer)
        for name, inner in flatten(tensor)[0].items() if is_wrapper(tensor) else ():
            reached = tracer.create_proxy("call_function", inner_tensor, (proxy, name), {})
            proxy_tensor.set_meta(reached, inner)
            track_tensor(inner, reached, constant=None, tracer=tracer)

    def proxy_call(mode: Any, func: Any, pre_dispatch: bool, args: Any, kwargs: Any) -> Any:
        leaves = [leaf for leaf in tree_leaves((args, kwargs)) if is_wrapper(leaf)]
        for leaf in leaves:
            _adopt(leaf, mode.tracer)
        _Within.depth += bool(leaves)
        try:
            return call(mode, func, pre_dispatch, args, kwargs)
        finally:
            _Within.depth -= bool(leaves)

    proxy_tensor.track_tensor, proxy_tensor.proxy_call = track_tensor, proxy_call
    # Marked constructors would record nodes of their own, of Python functions.
    marks: Any = wrappers
    find = marks._maybe_find_pre_dispatch_tf_mode_for_export
    marks._maybe_find_pre_dispatch_tf_mode_for_export = lambda: None
    try:
        yield
    finally:
        proxy_tensor.track_tensor, proxy_tensor.proxy_call = track, call
        marks._maybe_find_pre_dispatch_tf_mode_for_export = find


def _adopt(tensor: torch.Tensor, tracer: Any) -> None:
    """Give a tensor subclass that the traced code made of others a node."""
    if proxy_tensor.has_proxy_slot(tensor, tracer):
        return
    known = [proxy_tensor.get_proxy_slot(part, tracer, part, lambda slot: slot.proxy) for part in parts(tensor)]
    proxy = tracer.create_proxy("call_function", _wrap_like(tensor), (known,), {})
    proxy_tensor.set_meta(proxy, tensor)
    proxy_tensor.track_tensor(tensor, proxy, constant=None, tracer=tracer)


def trace_forward(
    function: Callable[..., Any],
    fakes: Sequence[Any],
    fake_mode: FakeTensorMode,
    *,
    keeps_frames_of: Callable[[str], bool],
    above_autograd: bool = True,
) -> torch.fx.GraphModule:
    """Trace `function` before autograd: composite operators, mutations in place, grad-mode changes as nodes.

    Args:
        function: takes and returns flat tensors.
        fakes: fake tensors of `fake_mode`, one per input.
        fake_mode: the mode under which the trace runs.
        keeps_frames_of: whether a source file is the user's, so that its lines are recorded.
        above_autograd: False: trace below autograd and function transforms, which then take no nodes: composite
            operators come decomposed, and grad-mode changes do not show.

    Returns:
        The graph, each node with `meta['val']` and, where known, `stack_trace` and `custom`.
    """
    with (
        exporting(),
        convolution_choice_unguarded(fake_mode),
        tracing(TracingContext(fake_mode)),
        fake_mode,
        torch.fx.traceback.preserve_node_meta(),
        _frames_kept(keeps_frames_of),
        _subclasses_tracked(),
    ):

        def adopting(*inputs: Any) -> Any:
            outputs = function(*inputs)
            mode = proxy_tensor.get_proxy_mode()
            for output in outputs:
                if is_wrapper(output) and mode is not None:
                    _adopt(output, mode.tracer)
            return outputs

        tracer = make_fx(
            adopting,
            tracing_mode="real",
            pre_dispatch=above_autograd,
            record_stack_traces=True,
            _allow_non_fake_inputs=True,
        )
        return tracer(*fakes)


@dataclass(frozen=True)
class FunctionalCapture:
    """A functional graph with what AOTAutograd knows about it.

    Attributes:
        module: the joint or inference graph; functional.
        metadata: mutations and aliases.
    """

    module: torch.fx.GraphModule
    metadata: ViewAndMutationMeta


class _Root(torch.nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self._function = function

    def forward(self, *inputs: Any) -> Any:
        return self._function(*inputs)


def capture_functional(
    function: Callable[..., Any], fakes: Sequence[Any], fake_mode: FakeTensorMode, *, grad: bool
) -> FunctionalCapture:
    """Capture `function` as a functional graph through AOTAutograd.

    Args:
        function: takes and returns flat tensors.
        fakes: fake tensors of `fake_mode`, one per input.
        fake_mode: goes on with its shape environment.
        grad: capture forward and backward; False: forward alone.
    """
    with (
        contextlib.ExitStack() as stack,
        exporting(),
        convolution_choice_unguarded(fake_mode),
        tracing(TracingContext(fake_mode)),
        torch.set_grad_enabled(grad),
        _linalg_errors_unordered(),
        _effects_kept(),
    ):
        joint = aot_export_joint_with_descriptors(stack, _Root(function), tuple(fakes), {}, ignore_shape_env=True)
        return FunctionalCapture(joint.graph_module, joint._aot_state.fw_metadata)


@contextlib.contextmanager
def _linalg_errors_unordered() -> Iterator[None]:
    """Let linear algebra's checks for errors be plain operators: their order among themselves needs no token."""
    effect = simple_registry.singleton.find("aten::_linalg_check_errors").effect
    before = effect._effect
    effect._effect = None
    try:
        yield
    finally:
        effect._effect = before


@contextlib.contextmanager
def _effects_kept() -> Iterator[None]:
    """Keep operators without a used result: random ones advance the generator, others check for errors."""
    original = torch.fx.Graph.eliminate_dead_code

    def eliminate(self: torch.fx.Graph, is_impure_node: Any = None) -> bool:
        def keeps(node: torch.fx.Node) -> bool:
            draws = torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
            checks = isinstance(node.target, OpOverload) and not node.target._schema.returns
            return draws or checks or (node.is_impure() if is_impure_node is None else is_impure_node(node))

        return original(self, keeps)

    torch.fx.Graph.eliminate_dead_code = eliminate  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.fx.Graph.eliminate_dead_code = original  # type: ignore[method-assign]


def insert_data_dependent_checks(module: torch.fx.GraphModule, shape_env: ShapeEnv) -> bool:
    """Write what `torch._check` says about sizes that only the data know into a graph; return whether there was any."""
    if not any(shape_env.is_unbacked_symint(symbol) for symbol in shape_env.var_to_range):
        return False
    for node in module.graph.find_nodes(op="call_function", target=torch.ops.aten.masked_select.default):
        # torch 2.13 bounds the count by the elements of the tensor before it is broadcast with the mask.
        shape_env.var_to_range[node.meta["val"].shape[0].node.expr] = ValueRanges(0, int_oo)
    before = len(module.graph.nodes)
    insert_deferred_runtime_asserts(module, shape_env, "forward", export=True)
    return len(module.graph.nodes) > before


def has_transforms(graph: torch.fx.Graph) -> bool:
    """Return whether nodes of a graph enter or leave a function transform (`torch.vmap`, `torch.func.grad`)."""
    targets = (node.target for node in graph.nodes if node.op == "call_function")
    return any(getattr(target, "__module__", "").startswith("torch._functorch") for target in targets)


def tangent_descriptor(node: torch.fx.Node) -> TangentAOTInput | None:
    """Return the descriptor of a placeholder that is a tangent, else None."""
    descriptor = node.meta.get("desc")
    return descriptor if isinstance(descriptor, TangentAOTInput) else None


def sizes_of_any_value() -> contextlib.AbstractContextManager[Any]:
    """Return a context in which a traced size of 0 or 1 is no fixed one, as in torch's ONNX exporter."""
    return torch.fx.experimental._config.patch(backed_size_oblivious=True)  # type: ignore[attr-defined]
