"""The only file that imports torch's private names; written for torch 2.13.

Every name is here with what it is for. `tests/meta/test_torch_internals.py` fails with a clear message when torch
moves one.
"""

from __future__ import annotations

import contextlib
import functools
import json
import re
import shutil
import subprocess
import tempfile
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any
from unittest import mock

import sympy
import torch
import torch._refs
import torch.fx.traceback

# Constructors of tensor subclasses that torch marks, which record themselves while an export goes on.
from torch._export import wrappers

# Fake tensors with a shape environment that knows the user's dynamic dimensions.
from torch._export.non_strict_utils import make_fake_inputs

# The composite operators, to take apart.
from torch._export.utils import _collect_all_valid_cia_ops_for_aten_namespace as composite_operators

# The metadata that functional graphs come with.
from torch._functorch._aot_autograd.descriptors import TangentAOTInput
from torch._functorch._aot_autograd.schemas import (
    InputAliasInfo,
    MemoryFormatMeta,
    MutationType,
    OutputAliasInfo,
    OutputType,
    PlainTensorMeta,
    SubclassCreationMeta,
    ViewAndMutationMeta,
)

# AOTAutograd's capture with descriptors: the route with torch.compile's full semantics.
from torch._functorch.aot_autograd import aot_export_joint_with_descriptors

# What Dynamo makes of custom autograd functions in code that torch compiles (branches of `torch.cond`).
from torch._functorch.autograd_function import AutogradFunctionApply

# The tracing context tells AOTAutograd which fake mode and shape environment to go on with.
from torch._guards import TracingContext, tracing

# Custom operators with the functions that define them, to tell the user what to import.
from torch._library import simple_registry
from torch._library.custom_ops import OPDEFS

# Sizes that fake kernels do not know.
from torch._library.fake_impl import FakeImplCtx, set_ctx_getter
from torch._subclasses.fake_impls import op_implementations_checks
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

# Dynamo's capture before anything is made of custom autograd functions.
from torch.export._trace import _export_to_torch_ir as export_to_torch_operators

# What users declare sizes and integers dynamic with: named dimensions, and hints (`Dim.DYNAMIC`, `Dim.AUTO`).
from torch.export.dynamic_shapes import _DimHint, _DimHintType, _StaticDim
from torch.fx.experimental import _config as shape_config
from torch.fx.experimental import proxy_tensor, symbolic_shapes
from torch.fx.experimental.proxy_tensor import PythonKeyTracer, make_fx
from torch.fx.experimental.symbolic_shapes import (
    ConstraintViolationError,
    ConvertIntKey,
    DimDynamic,
    GuardOnDataDependentSymNode,
    ShapeEnv,
)
from torch.fx.passes.runtime_assert import insert_deferred_runtime_asserts
from torch.fx.proxy import GraphAppendingTracer

# Containers that torch's tree utilities know and this package does not (caches of model libraries).
from torch.utils._pytree import SUPPORTED_NODES, key_get, tree_leaves, tree_map
from torch.utils._sympy.interp import sympy_interp
from torch.utils._sympy.numbers import int_oo
from torch.utils._sympy.reference import PythonReferenceAnalysis
from torch.utils._sympy.symbol import SymT, symbol_is_type
from torch.utils._sympy.value_ranges import ValueRanges

# The tracer's table of tensors.
from torch.utils.weak import WeakTensorKeyDictionary

from aotexport_runtime.subclasses import flatten, inner_tensor, is_wrapper, parts, protocol

# Torch's own method, whatever stands in for it.
REQUIRES_GRAD = torch._C.TensorBase.requires_grad_

# The function transforms that are active.
TRANSFORMS: Any = torch._C._functorch  # type: ignore[attr-defined]

# What nodes of a pre-dispatch graph call, beside operators.
OpOverload = torch._ops.OpOverload
HigherOrderOperator = torch._ops.HigherOrderOperator
SET_GRAD_ENABLED = torch._C._set_grad_enabled
ENTER_AUTOCAST = torch.amp.autocast_mode._enter_autocast
EXIT_AUTOCAST = torch.amp.autocast_mode._exit_autocast

__all__ = [
    "ENTER_AUTOCAST",
    "EXIT_AUTOCAST",
    "MATH_FUNCTIONS",
    "REQUIRES_GRAD",
    "SET_GRAD_ENABLED",
    "SUPPORTED_NODES",
    "AutogradFunctionApply",
    "ConstraintViolationError",
    "FakeTensor",
    "FakeTensorMode",
    "FunctionalCapture",
    "GuardOnDataDependentSymNode",
    "HigherOrderOperator",
    "InputAliasInfo",
    "MemoryFormatMeta",
    "MutationType",
    "OpOverload",
    "OutputAliasInfo",
    "OutputType",
    "PlainTensorMeta",
    "ShapeEnv",
    "SubclassCreationMeta",
    "ViewAndMutationMeta",
    "add_check",
    "applied_functions",
    "average_in_tensors",
    "branches_follow",
    "capture_functional",
    "compile_library",
    "current_tracer",
    "custom_operator_module",
    "export_to_torch_operators",
    "exporting",
    "fake_kernels",
    "find_symbol",
    "fixed_symbols",
    "forward_mode_rules_hidden",
    "general_sizes_kept",
    "has_transforms",
    "insert_data_dependent_checks",
    "int_oo",
    "is_data_dependent",
    "is_dimension",
    "is_fixed_dimension",
    "is_float_of_tensors",
    "is_required_dimension",
    "is_wrap",
    "lift_tensors",
    "make_fake_inputs",
    "mark_unchecked",
    "masks_unread",
    "number_at",
    "onednn_disabled",
    "raised_in_transform",
    "record_call",
    "stamped",
    "symbolic_sizes",
    "tensor_of_numbers",
    "trace_body",
    "trace_decomposed",
    "trace_forward",
    "traces_above_autograd",
    "tracing_paused",
    "transforms_left",
    "tree_map",
    "unchecked_assumption",
    "within_subclass",
    "zero_and_one_symbolic",
]


def is_dimension(spec: Any) -> bool:
    """Return whether `spec` declares a size or an integer dynamic: a named dimension, `Dim.DYNAMIC` or `Dim.AUTO`."""
    return isinstance(spec, torch.export.Dim | _DimHint) and not is_fixed_dimension(spec)


def is_required_dimension(spec: Any) -> bool:
    """Return whether `spec` declares a dimension that must be dynamic: a named one, or `Dim.DYNAMIC`."""
    return is_dimension(spec) and getattr(spec, "type", _DimHintType.DYNAMIC) is _DimHintType.DYNAMIC


def is_fixed_dimension(spec: Any) -> bool:
    """Return whether `spec` declares a size or an integer fixed: `Dim.STATIC`, a number, or nothing at all."""
    static_hint = isinstance(spec, _DimHint) and spec.type is _DimHintType.STATIC
    return spec is None or isinstance(spec, int | _StaticDim) or static_hint


MATH_FUNCTIONS: dict[str, Callable[[Any], Any]] = {
    name: getattr(torch, f"_sym_{name}")
    for name in ("sqrt", "log2", "cos", "cosh", "sin", "sinh", "tan", "tanh", "acos", "asin", "atan")
}
"""Functions of `math` from a number to a float, for symbolic numbers."""


def tensor_of_numbers(data: Any, **options: Any) -> torch.Tensor:
    """Return what `torch.tensor` gives for (nested lists of) numbers, symbolic ones among them."""
    return torch._refs.tensor(data, **options)


@contextlib.contextmanager
def fixed_symbols(shape_env: ShapeEnv, seen: Callable[[sympy.Symbol], None]) -> Iterator[None]:
    """Call `seen` with every symbol that the shape environment comes to hold to a number, at that moment."""
    replace = shape_env._set_replacement

    def watched(symbol: sympy.Symbol, value: sympy.Expr, reason: str) -> None:
        if value.is_number:
            seen(symbol)
        replace(symbol, value, reason)

    shape_env._set_replacement = watched  # type: ignore[method-assign]
    try:
        yield
    finally:
        del shape_env._set_replacement


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


@contextlib.contextmanager
def forward_mode_rules_hidden() -> Iterator[None]:
    """Let custom autograd functions seem to have no rule of forward-mode AD."""
    found: list[type] = [torch.autograd.Function]
    for function in found:
        found += function.__subclasses__()
    rules = {function: vars(function)["jvp"] for function in found[1:] if "jvp" in vars(function)}
    for function in rules:
        del function.jvp  # type: ignore[attr-defined]
    try:
        yield
    finally:
        for function, rule in rules.items():
            function.jvp = rule  # type: ignore[attr-defined]


_WATCH = "_aotexport_applied"


Apply = Callable[..., Any]


@contextlib.contextmanager
def applied_functions(apply_instead: Callable[[Any, tuple[Any, ...], dict[str, Any], Apply], Any]) -> Iterator[None]:
    """Call `apply_instead` where custom autograd functions are applied, with class, arguments and torch's `apply`.

    The code of `Function.apply` is exchanged, not the attribute: models bind the method beforehand (`apply = F.apply`).
    """
    apply = vars(torch.autograd.Function)["apply"].__func__
    original = FunctionType(apply.__code__, apply.__globals__, apply.__name__, apply.__defaults__, apply.__closure__)

    def watch(cls: type, *args: Any, **kwargs: Any) -> Any:
        return apply_instead(cls, args, kwargs, original)

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


@contextlib.contextmanager
def fake_kernels(kernels: Mapping[Any, Callable[..., Any]]) -> Iterator[None]:
    """Let fake tensors take `kernels` for operators that torch refuses as data-dependent."""

    def takes(operator: Any) -> bool:
        return operator in kernels

    def run(mode: FakeTensorMode, operator: Any, *args: Any, **kwargs: Any) -> Any:
        context = FakeImplCtx(mode, operator)
        with set_ctx_getter(lambda: context), mode:
            return kernels[operator](*args, **kwargs)

    op_implementations_checks.insert(0, (takes, run))
    try:
        yield
    finally:
        op_implementations_checks.remove((takes, run))


@contextlib.contextmanager
def average_in_tensors() -> Iterator[None]:
    """Let batch normalization with a cumulative average (`momentum=None`) keep the factor, 1 / calls, a tensor."""
    layer = torch.nn.modules.batchnorm._BatchNorm
    original = layer.forward

    def forward(self: Any, input: torch.Tensor) -> torch.Tensor:
        if self.momentum is not None or not self.training or self.running_mean is None:
            return original(self, input)
        self._check_input_dim(input)
        self.num_batches_tracked.add_(1)
        mean, var = torch.zeros_like(self.running_mean), torch.zeros_like(self.running_var)
        output = torch.nn.functional.batch_norm(input, mean, var, self.weight, self.bias, True, 1.0, self.eps)
        for running, current in ((self.running_mean, mean), (self.running_var, var)):
            running.add_((current - running) / self.num_batches_tracked)
        return output

    layer.forward = forward  # type: ignore[method-assign]
    try:
        yield
    finally:
        layer.forward = original  # type: ignore[method-assign]


def _asks_for_zero_or_one(condition: sympy.Basic) -> bool:
    special = (0, 1) if isinstance(condition, sympy.Eq | sympy.Ne) else (0, 1, 2)
    return isinstance(condition, sympy.core.relational.Relational) and any(side in special for side in condition.args)


@contextlib.contextmanager
def zero_and_one_symbolic(*, symbolic: bool) -> Iterator[None]:
    """Give dynamic sizes a symbol also where the example has 0 or 1, which torch takes for special ones otherwise."""
    with shape_config.patch(backed_size_oblivious=symbolic):  # type: ignore[attr-defined]
        yield


@contextlib.contextmanager
def general_sizes_kept(assumed: Callable[[Any], None]) -> Iterator[None]:
    """Let torch take its general path where that is right for all sizes, instead of holding calls to the example's.

    Torch's operators ask whether a size is 0 or 1, or a layout contiguous, and go on with an answer that is always
    right (`guard_or_false`, `guard_or_true`); for sizes that have an example value they still guard on it. Here they
    guard only where the example takes a special path, and not because a size of it happens to be 0 or 1.

    Args:
        assumed: called with each condition (a sympy expression) that a trace took for granted and did not guard on.
            Operators are right without it; the layouts and aliases of a trace may be others.
    """
    original = symbolic_shapes._guard_or

    def general(condition: Any, default: bool) -> bool:
        if not isinstance(condition, torch.SymBool) or not condition.node.has_hint():
            return original(condition, default)
        if bool(condition.node.hint) is not default and not _asks_for_zero_or_one(condition.node.expr):
            return original(condition, default)
        known = symbolic_shapes._static_eval_sym_bool(condition)
        if known is None:
            expression = condition.node.expr
            assumed(expression if default else sympy.Not(expression))
            return default
        return known

    symbolic_shapes._guard_or = general
    try:
        yield
    finally:
        symbolic_shapes._guard_or = original


def custom_operator_module(name: str) -> str | None:
    """Return the Python module that registered the custom operator `namespace::base.overload`, where torch knows."""
    definition = OPDEFS.get(name.partition(".")[0])
    return None if definition is None else getattr(definition._init_fn, "__module__", None)


@contextlib.contextmanager
def stamped(stamp: Callable[[torch.fx.Node], None]) -> Iterator[None]:
    """Call `stamp` with every node that is traced."""
    original = PythonKeyTracer.create_node

    def create_node(self: PythonKeyTracer, *args: Any, **kwargs: Any) -> torch.fx.Node:
        node = original(self, *args, **kwargs)
        stamp(node)
        return node

    PythonKeyTracer.create_node = create_node  # type: ignore[method-assign]
    try:
        yield
    finally:
        PythonKeyTracer.create_node = original  # type: ignore[method-assign]


def node_annotations() -> dict[str, Any]:
    """Return the mutable mapping whose entries the tracer copies to `node.meta['custom']` of new nodes."""
    return torch.fx.traceback.get_current_meta().setdefault("custom", {})


@contextlib.contextmanager
def _frames_kept(keeps: Callable[[str], bool]) -> Iterator[None]:
    """Record the frames below the call of the model that `keeps` takes; torch keeps functions called `forward`."""
    original = PythonKeyTracer._filter_traceback_frames
    # Frames of this package that follow stand in for what the model calls.
    caller = str(Path(__file__).parent / "capture" / "forward.py")

    def frames(self: PythonKeyTracer, summary: traceback.StackSummary) -> traceback.StackSummary:
        last = max((i for i, frame in enumerate(summary) if frame.filename == caller), default=-1)
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


class _TensorsByMemory(WeakTensorKeyDictionary):
    """The tracer's tensors, found by their memory where the object is another.

    Autograd keeps what an operator returned for backward, and gives it back as a new tensor of the same memory. A model
    that computes gradients of its own reads it there.
    """

    def __init__(self) -> None:
        super().__init__()
        self._by_memory: dict[Any, tuple[Any, Any]] = {}

    def __setitem__(self, tensor: torch.Tensor, proxy: Any) -> None:
        super().__setitem__(tensor, proxy)
        if isinstance(tensor, FakeTensor):
            # The storage is kept: its address must not be given to another.
            self._by_memory[_memory(tensor)] = (tensor.untyped_storage(), proxy)

    def get(self, tensor: torch.Tensor, default: Any = None) -> Any:
        found = super().get(tensor)
        if found is None and isinstance(tensor, FakeTensor):
            return self._by_memory.get(_memory(tensor), (None, default))[1]
        return default if found is None else found


def _composites_apart() -> dict[Any, Callable[..., Any]]:
    """Return a decomposition of every composite operator without mutations and views into those it calls."""
    return {operator: operator.decompose for operator in composite_operators() if isinstance(operator, OpOverload)}


def _memory(tensor: torch.Tensor) -> Any:
    """Return what two tensors that hold the same elements of the same memory have in common."""
    layout = (*tensor.size(), *tensor.stride(), tensor.storage_offset())
    sizes = tuple(size if isinstance(size, int) else str(size) for size in layout)
    return tensor.untyped_storage()._cdata, tensor.dtype, tensor.is_conj(), tensor.is_neg(), sizes


@contextlib.contextmanager
def _saved_tensors_known() -> Iterator[None]:
    """Let tracers know tensors that autograd saved."""
    original = PythonKeyTracer.__init__

    def init(self: PythonKeyTracer) -> None:
        original(self)
        self.tensor_tracker = _TensorsByMemory()

    PythonKeyTracer.__init__ = init  # type: ignore[method-assign]
    try:
        yield
    finally:
        PythonKeyTracer.__init__ = original  # type: ignore[method-assign]


def trace_forward(
    function: Callable[..., Any],
    fakes: Sequence[Any],
    fake_mode: FakeTensorMode,
    *,
    keeps_frames_of: Callable[[str], bool],
    decompositions: Mapping[Any, Callable[..., Any]],
    above_autograd: bool = True,
    whole_composites: bool = True,
) -> torch.fx.GraphModule:
    """Trace `function` before autograd: composite operators, mutations in place, grad-mode changes as nodes.

    Args:
        function: takes and returns flat tensors.
        fakes: fake tensors of `fake_mode`, one per input.
        fake_mode: the mode under which the trace runs.
        keeps_frames_of: whether a source file is the user's, so that its lines are recorded.
        decompositions: functions that stand in for operators, which then take no nodes.
        above_autograd: False: trace below autograd and function transforms, which then take no nodes: composite
            operators come decomposed, and grad-mode changes do not show.
        whole_composites: False: take composite operators apart, so that nothing that autograd saves is hidden in them.

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
        _saved_tensors_known(),
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
            decomposition_table={**({} if whole_composites else _composites_apart()), **decompositions},
            tracing_mode="real",
            pre_dispatch=above_autograd,
            record_stack_traces=True,
            _allow_non_fake_inputs=True,
        )
        return tracer(*fakes)


def traces_above_autograd() -> bool:
    """Return whether a forward graph is being traced, and no function transform stands in between."""
    mode = proxy_tensor.get_proxy_mode()
    return mode is not None and mode.pre_dispatch and not torch._C._are_functorch_transforms_active()


@contextlib.contextmanager
def tracing_paused() -> Iterator[PythonKeyTracer]:
    """Record nothing for a while, neither operators nor changes of grad mode; yield the tracer."""
    modes = [torch.overrides._pop_mode() for _ in torch.overrides._get_current_function_mode_stack()]
    try:
        with proxy_tensor.disable_proxy_modes_tracing() as mode:
            yield mode.tracer  # type: ignore[misc]
    finally:
        for mode in reversed(modes):
            torch.overrides._push_mode(mode)


def trace_body(
    function: Callable[..., Any], operands: Sequence[Any], *, keeps_frames_of: Callable[[str], bool]
) -> torch.fx.GraphModule:
    """Trace the body of an operator, while the trace around it is paused.

    Tensors that `function` takes from elsewhere become attributes of the graph; `lift_tensors` makes them inputs.

    Args:
        function: takes the operands and returns a list of values.
        operands: fake tensors and sizes.
        keeps_frames_of: see `trace_forward`.
    """
    current = proxy_tensor._CURRENT_MAKE_FX_TRACER
    assert current is not None
    tracer = current._make_sub_tracer()
    with tracer._init_modes_from_parent(current), _frames_kept(keeps_frames_of):
        assert tracer.fx_tracer is not None
        tracer.fx_tracer.record_stack_traces = True
        return tracer._trace_inner(function, *operands)


def lift_tensors(bodies: Sequence[torch.fx.GraphModule]) -> list[torch.Tensor]:
    """Turn tensors that bodies close over into further inputs, the same of each body; return them."""
    found: dict[int, torch.Tensor] = {}
    for body in bodies:
        for node in body.graph.find_nodes(op="get_attr"):
            tensor = getattr(body, str(node.target))
            if isinstance(tensor, torch.Tensor):
                found[id(tensor)] = tensor
    for body in bodies:
        first = next(node for node in body.graph.nodes if node.op != "placeholder")
        with body.graph.inserting_before(first):
            placeholders = {key: body.graph.placeholder(f"lifted_{index}") for index, key in enumerate(found)}
        for key, placeholder in placeholders.items():
            placeholder.meta["val"] = found[key]
        taken: list[str] = []
        for node in body.graph.find_nodes(op="get_attr"):
            tensor = getattr(body, str(node.target))
            if isinstance(tensor, torch.Tensor):
                taken.append(str(node.target))
                node.replace_all_uses_with(placeholders[id(tensor)])
                body.graph.erase_node(node)
        for name in dict.fromkeys(taken):
            delattr(body, name)
    return list(found.values())


def record_call(tracer: PythonKeyTracer, target: Callable[..., Any], args: tuple[Any, ...], results: list[Any]) -> None:
    """Record a call with bodies among its arguments, and that `results` are what it returns.

    Raises:
        LookupError: an argument is a tensor that the trace knows nothing of.
    """
    current = proxy_tensor._CURRENT_MAKE_FX_TRACER
    nested = current is not None and current.is_hop_subgraph_tracer()
    for leaf in tree_leaves(args):
        known = nested or not isinstance(leaf, FakeTensor) or proxy_tensor.has_proxy_slot(leaf, tracer)
        if not known:
            raise LookupError("a body uses a tensor that was computed elsewhere and is not passed to it")
        if isinstance(leaf, torch.fx.GraphModule):
            tracer.root.register_module(tracer.get_fresh_qualname("body"), leaf)
    proxy = tracer.create_proxy("call_function", target, tree_map(tracer.unwrap_proxy, args), {})
    proxy_tensor.track_tensor_tree(results, proxy, constant=None, tracer=tracer)


def mark_unchecked(tensors: Sequence[torch.Tensor]) -> None:
    """Note in a functional graph being traced that backward takes these values without a look at their version."""
    for tensor in tensors:
        for proxy in proxy_tensor._get_proxies(tensor):
            proxy.node.meta["saved_tensor_with_no_vc_check"] = True


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
    function: Callable[..., Any],
    fakes: Sequence[Any],
    fake_mode: FakeTensorMode,
    *,
    kernels: Mapping[Any, Callable[..., Any]],
    grad: bool,
) -> FunctionalCapture:
    """Capture `function` as a functional graph through AOTAutograd.

    Args:
        function: takes and returns flat tensors.
        fakes: fake tensors of `fake_mode`, one per input.
        fake_mode: goes on with its shape environment.
        kernels: see `fake_kernels`.
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
        fake_kernels(kernels),
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


_TORCH_CHECK = re.compile(r"Runtime assertion failed for expression (.*) on node '\w+'")
_FROM_DATA = (SymT.UNBACKED_INT, SymT.UNBACKED_FLOAT)


def raised_in_transform(error: BaseException) -> bool:
    """Return whether an error came out of a function transform (`torch.vmap`, `torch.func.grad`)."""
    files = [frame.f_code.co_filename for frame, _ in traceback.walk_tb(error.__traceback__)]
    return any("_functorch" in Path(file).parts and Path(file).stem in ("vmap", "eager_transforms") for file in files)


@contextlib.contextmanager
def transforms_left() -> Iterator[None]:
    """Leave the function transforms that the block enters and, failing, does not leave."""
    depth = TRANSFORMS.get_dynamic_layer_stack_depth()
    try:
        yield
    finally:
        TRANSFORMS.pop_dynamic_layer_stack_and_undo_to_depth(depth)


def is_data_dependent(number: torch.SymInt | torch.SymFloat | torch.SymBool) -> bool:
    """Return whether a symbolic number depends on the values of tensors."""
    return any(symbol_is_type(symbol, _FROM_DATA) for symbol in number.node.expr.free_symbols)


def insert_data_dependent_checks(module: torch.fx.GraphModule, shape_env: ShapeEnv) -> None:
    """Write what a trace assumed about numbers that only the data know into its graph."""
    if not any(symbol_is_type(symbol, _FROM_DATA) for symbol in shape_env.var_to_range):
        return
    for node in module.graph.find_nodes(op="call_function", target=torch.ops.aten.masked_select.default):
        # torch 2.13 bounds the count by the elements of the tensor before it is broadcast with the mask.
        shape_env.var_to_range[node.meta["val"].shape[0].node.expr] = ValueRanges(0, int_oo)
    for symbol, _ in _truth_values(module.graph):
        # That a truth value is 0 or 1 is not worth a check.
        shape_env.var_to_range[symbol] = ValueRanges.unknown_int()
    _describe_checks(module.graph)
    insert_deferred_runtime_asserts(module, shape_env, "forward", export=True)
    for node in module.graph.find_nodes(op="call_function", target=torch.ops.aten._assert_scalar.default):
        condition, message = node.args
        told = _TORCH_CHECK.fullmatch(str(message))
        if told is not None:
            assumed = re.sub(r"\b(u|zuf)\d+\b", "value", told[1])
            node.args = (condition, f"the program needs `{assumed}` of a number that only the data know")


# --- branches on the values of tensors --------------------------------------------------------------------


class _Answers(dict[Any, Any]):
    """What `ShapeEnv.real_tensor_prop_unbacked_vals` holds, looked up when it is asked for."""

    def __init__(self, get: Callable[[Any], Any]) -> None:
        super().__init__()
        self._get = get

    def __len__(self) -> int:
        return 1

    def __contains__(self, key: object) -> bool:
        return self[key] is not None

    def __getitem__(self, key: Any) -> Any:
        return self._get(key) if isinstance(key, sympy.Symbol) else None

    def get(self, key: Any, default: Any = None) -> Any:
        return default if (value := self[key]) is None else value


@contextlib.contextmanager
def branches_follow(
    shape_env: ShapeEnv, get: Callable[[Any], Any], decided: Callable[[Any, Any], None]
) -> Iterator[None]:
    """Let code that branches on data-dependent numbers go the way that their values tell.

    Torch would check what such code assumes where the number is computed; that is left to `decided`.

    Args:
        shape_env: of the trace.
        get: gives the value of a data-dependent symbol, or None.
        decided: called with each expression that code branched on, and its value.
    """
    before = shape_env.real_tensor_prop_unbacked_vals
    defer, ranges = shape_env.guard_or_defer_runtime_assert, shape_env.var_to_range
    narrowed: dict[Any, tuple[Any, Any]] = {}

    def defer_but_branches(expression: Any, message: str, fx_node: Any = None) -> bool:
        if not message.startswith("propagate_real_tensors"):
            return defer(expression, message, fx_node)
        old = {symbol: ranges[symbol] for symbol in expression.free_symbols}
        holds = defer(expression, message, fx_node)
        for asserts in shape_env.deferred_runtime_asserts.values():
            asserts[:] = [deferred for deferred in asserts if deferred.msg != message]
        for symbol, range_ in old.items():
            first, last = narrowed.get(symbol, (range_, range_))
            narrowed[symbol] = (first if last == range_ else range_), ranges[symbol]
        return holds

    shape_env.real_tensor_prop_unbacked_vals = _Answers(get)
    shape_env._log_real_tensor_propagation = decided  # type: ignore[method-assign]
    shape_env.guard_or_defer_runtime_assert = defer_but_branches  # type: ignore[method-assign]
    try:
        yield
    finally:
        shape_env.real_tensor_prop_unbacked_vals = before
        del shape_env._log_real_tensor_propagation, shape_env.guard_or_defer_runtime_assert
        # What branches say about a range is in their checks.
        ranges.update({symbol: first for symbol, (first, last) in narrowed.items() if ranges[symbol] == last})


def current_tracer() -> Any:
    """Return the tracer of the trace that is going on; None: there is none."""
    mode = proxy_tensor.get_proxy_mode()
    return None if mode is None else mode.tracer


def find_symbol(graph: torch.fx.Graph, symbol: Any) -> tuple[torch.fx.Node, Any] | None:
    """Return the node whose result holds a data-dependent symbol, with the path to it in the result; None: no node."""
    for node in reversed(graph.nodes):
        path = _bindings(node).get(symbol)
        if path is not None:
            return node, path
    return None


def number_at(value: Any, path: Any) -> Any:
    """Return the number at `path` in the result of a node, for use in expressions."""
    return sympy.sympify(key_get(value, path))


def is_float_of_tensors(expression: Any, value: Any) -> bool:
    """Return whether an expression with this value is a float computed from floats of tensors."""
    floats = [symbol for symbol in expression.free_symbols if symbol_is_type(symbol, SymT.UNBACKED_FLOAT)]
    return bool(floats) and not value.is_Boolean and not expression.is_integer


def add_check(graph: torch.fx.Graph, expression: Any, value: Any, message: str, stack_trace: str) -> None:
    """Append the check that an expression of data-dependent symbols has this value.

    Args:
        graph: of a trace that is going on; it defines the symbols.
        expression: comparison or integer.
        value: what it must be.
        message: for the error of a call where it is something else.
        stack_trace: where the code depends on it.
    """
    tracer = GraphAppendingTracer(graph)
    before = set(graph.nodes)
    truth = next((node for symbol, node in _truth_values(graph) if expression == sympy.Eq(symbol, 1)), None)
    if truth is not None:
        condition: Any = torch.fx.Proxy(truth, tracer)
    else:
        proxies = {symbol: torch.fx.Proxy(_number(graph, symbol), tracer) for symbol in expression.free_symbols}
        condition = sympy_interp(PythonReferenceAnalysis, proxies, expression)
    if value == sympy.false:
        condition = torch.sym_not(condition)
    elif value != sympy.true:
        condition = condition == (int(value) if value.is_Integer else float(value))
    graph.call_function(torch.ops.aten._assert_scalar.default, (condition.node, message))
    for node in graph.nodes:
        if node not in before:
            node.meta.update(stack_trace=stack_trace, checks=True)


def _truth_values(graph: torch.fx.Graph) -> Iterator[tuple[Any, torch.fx.Node]]:
    """Return the data-dependent symbols that are 1 where a truth value is true, with the nodes that compute it."""
    for node in graph.nodes:
        for symbol, path in _bindings(node).items():
            if any(isinstance(key, ConvertIntKey) for key in path):
                yield symbol, node


def _number(graph: torch.fx.Graph, symbol: Any) -> torch.fx.Node:
    """Return a node whose result is a symbol, appended where the graph has none.

    Raises:
        LookupError: no result of the graph has the symbol, and no input has it as a size.
    """
    found = find_symbol(graph, symbol)
    if found is None:
        for node in graph.find_nodes(op="placeholder"):
            for axis, size in enumerate(getattr(node.meta.get("val"), "shape", ())):
                if isinstance(size, torch.SymInt) and size.node.expr == symbol:
                    return graph.create_size_node(node, axis)
        raise LookupError(f"no input has the size {symbol}")
    return graph._resolve_unbacked_binding(found[0], tuple(found[1]), lower_symint=int)


def unchecked_assumption(
    forward: torch.fx.GraphModule, functional: torch.fx.GraphModule, shape_env: ShapeEnv
) -> Any | None:
    """Return what the trace of a functional graph assumed about data-dependent numbers beyond the forward graph.

    Args:
        forward: holds checks of all that its own trace assumed.
        functional: traced from it; has its checks, and nodes that tell their origin in it.
        shape_env: of both traces.

    Returns:
        An expression over the forward graph's symbols; None: there is none.
    """
    symbols = {(node.name, str(path)): s for node in forward.graph.nodes for s, path in _bindings(node).items()}
    same = {
        symbol: symbols.get(((node.meta.get("custom") or {}).get("origin", ""), str(path)), symbol)
        for node in functional.graph.nodes
        for symbol, path in _bindings(node).items()
    }
    for symbol in same:
        for deferred in shape_env.deferred_runtime_asserts.get(symbol, ()):
            own = {s for s in deferred.expr.free_symbols if symbol_is_type(s, _FROM_DATA)}
            if own <= same.keys():
                expression = deferred.expr.xreplace(same)
                if shape_env._maybe_evaluate_static(expression) != sympy.true:
                    return expression
    return None


def _bindings(node: torch.fx.Node) -> dict[Any, Any]:
    """Return the data-dependent symbols that the result of a node brings in, with the path to each."""
    return node.meta.get("unbacked_bindings") or {}


def _describe_checks(graph: torch.fx.Graph) -> None:
    """Give the nodes that compute the conditions of checks what tracing would have."""
    for node in graph.nodes:
        if node.meta.pop("checks", False):
            args = torch.fx.map_arg(node.args, lambda arg: arg.meta["val"])
            node.meta["val"] = node.target(*args)


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


# --- lowering: torch's compiler is imported when it is needed, which takes seconds --------------------------


def symbolic_sizes(sizes: Mapping[str, tuple[int, int | None]]) -> tuple[FakeTensorMode, dict[str, torch.SymInt]]:
    """Return a fake mode with fresh symbolic integers.

    Args:
        sizes: per name, the value at hand, and the greatest, which may be open; the least is 2.
    """
    from torch._dynamo.source import ConstantSource

    environment = ShapeEnv()
    symbols: dict[str, torch.SymInt] = {}
    for name, (value, high) in sizes.items():
        source = ConstantSource(name)
        symbol = environment.create_symbol(value, source, dynamic_dim=DimDynamic.DYNAMIC, constraint_dim=None)
        environment.constrain_symbol_range(symbol, 2, int_oo if high is None else high)
        size = environment.create_symintnode(symbol, hint=value, source=source)
        assert isinstance(size, torch.SymInt)
        symbols[name] = size
    return FakeTensorMode(shape_env=environment), symbols


def trace_decomposed(
    function: Callable[..., Any], fakes: Sequence[torch.Tensor], fake_mode: FakeTensorMode
) -> torch.fx.GraphModule:
    """Trace a function of tensors as the operators that torch's compiler fuses.

    Args:
        function: functional; takes and returns flat tensors.
        fakes: fake tensors of `fake_mode`, one per input.
        fake_mode: the mode under which the trace runs.
    """
    from torch._inductor import config
    from torch._inductor.decomposition import select_decomp_table

    # Random operators stay whole, so that they draw eager's numbers.
    whole = config.patch(fallback_random=True)
    with whole, fake_mode, torch.no_grad(), tracing(TracingContext(fake_mode)):
        tracer = make_fx(function, select_decomp_table(), tracing_mode="real", _allow_non_fake_inputs=True)
        return tracer(*fakes)


def compile_library(
    module: torch.fx.GraphModule,
    fakes: Sequence[torch.Tensor],
    fake_mode: FakeTensorMode,
    path: Path,
    *,
    march: str,
    vector_nbits: int,
    ordered: bool,
) -> None:
    """Compile a graph to a shared library for processors, by AOTInductor.

    Indices are not checked against bounds: see `lower/cpu/indices.py`.

    Args:
        module: of `trace_decomposed`; taken over. Its results keep the strides that they were traced with.
        fakes: what it was traced with.
        fake_mode: what they are of.
        path: the library; nothing else is written beside it.
        march: instruction set, as the C++ compiler names it.
        vector_nbits: width of vector registers.
        ordered: whether operators keep their order, since they draw random numbers.

    Raises:
        NotImplementedError: it calls operators that libraries have no entry point for.
    """
    from torch._inductor import compile_fx, config, cpu_vec_isa
    from torch._inductor.codegen.cpp import CppKernel
    from torch._inductor.virtualized import V

    isa = cpu_vec_isa.VecAVX512() if vector_nbits == 512 else cpu_vec_isa.VecAVX2()
    decide = CppKernel.decide_parallel_depth

    def decide_at_compile_time(self: CppKernel, *args: Any) -> Any:
        # With threads counted at run time every loop would be parallel, those of three elements as well.
        with config.patch({"cpp.dynamic_threads": False}):
            return decide(self, *args)

    with contextlib.ExitStack() as stack:
        scratch = stack.enter_context(tempfile.TemporaryDirectory())
        options = {
            **compile_fx.get_cpp_wrapper_config(),
            "aot_inductor.output_path": f"{scratch}/library.so",
            "assert_indirect_indexing": False,
            "cpp_wrapper": True,
            "cpp.dynamic_threads": True,
            "cpp.march": march,
            "cpp.simdlen": vector_nbits,
            "cpp.threads": 4,
            "fallback_random": True,
            "reorder_for_peak_memory": not ordered,
        }
        stack.enter_context(torch.no_grad())
        stack.enter_context(config.patch(options))
        stack.enter_context(V.set_aot_compilation(True))
        stack.enter_context(V.set_fake_mode(fake_mode))
        stack.enter_context(tracing(TracingContext(fake_mode)))
        stack.enter_context(mock.patch.object(cpu_vec_isa, "valid_vec_isa_list", return_value=[isa]))
        stack.enter_context(mock.patch.object(CppKernel, "decide_parallel_depth", decide_at_compile_time))
        (output,) = module.graph.find_nodes(op="output")
        compiled: Any = compile_fx.compile_fx_forward(
            module,
            list(fakes),
            num_orig_model_outputs=len(output.args[0]),
            num_example_inputs=len(fakes),
            compiler_config_extra=compile_fx.create_compiler_config_extra(module),
            inner_compile=functools.partial(compile_fx.compile_fx_inner, cpp_wrapper=True),
            is_inference=True,
        )
        called = [file for file in Path(scratch).glob("*.json") if not file.name.endswith("_metadata.json")]
        if called:
            # The runner could call them through a table beside the library.
            nodes = json.loads(called[0].read_text())["nodes"]
            raise NotImplementedError(f"no stable entry point for {sorted({node['node']['target'] for node in nodes})}")
        shutil.copyfile(compiled.filename, path)
    _strip(path)


def _strip(library: Path) -> None:
    """Leave out what only debuggers read, four fifths of a library, where there is a tool for it."""
    tool = shutil.which("strip")
    if tool is not None:
        subprocess.run([tool, "--strip-unneeded", str(library)], check=True)
