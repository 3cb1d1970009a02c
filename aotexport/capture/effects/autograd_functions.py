"""Record custom autograd functions as nodes with subgraphs for their forward and their own backward.

A node applies an autograd function again when it runs, so autograd sees the same as in eager execution.
Source: torch 2.13, `torch/csrc/autograd/python_function.cpp` (`THPFunction_apply`, `PyNode::apply`).
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch.autograd.function import FunctionCtx, once_differentiable

from aotexport.capture.effects.applied_function import AppliedFunction, apply_function
from aotexport.capture.effects.grad_mode import BACKWARD, make_relative, traced_as
from aotexport.capture.effects.needed_gradients import NeededGradients, dependence, is_differentiable
from aotexport.capture.effects.questions import current_questions
from aotexport.errors import ExportFailed
from aotexport.model.refusals import attempt
from aotexport.model.source_lines import is_user_file, is_user_frame, user_line
from aotexport.process.patches import Patch, caller, patched
from aotexport.torch_internals.calls import tree_leaves
from aotexport.torch_internals.subgraphs import lift_tensors
from aotexport.torch_internals.tracing import record_call, trace_subgraph, traces_subgraph, tracing_paused

_MAX_PATTERNS = 8
"""The largest number of patterns of undefined gradients to trace a function for."""

_MAX_ORDER = 2
"""The highest order of derivatives to record; a backward that applies its own function has no end of them."""

_order: ContextVar[int] = ContextVar("_order", default=0)
"""Number of backwards being traced, one within the other."""


class NotRepresentable(ExportFailed):
    """A custom function that a node cannot hold; the message says why."""


class _Context(FunctionCtx):
    """The `ctx` of a traced function: plain attributes."""

    to_save: tuple[torch.Tensor | None, ...] = ()
    dirty_tensors: tuple[torch.Tensor, ...] = ()
    non_differentiable: tuple[torch.Tensor, ...] = ()
    materialize_grads: bool = True

    def __init__(self, function: type, needs_input_grad: NeededGradients) -> None:
        self.needs_input_grad = needs_input_grad
        self._forward_cls = function

    @property
    def saved_tensors(self) -> tuple[torch.Tensor | None, ...]:
        return self.to_save


def _stashed(context: _Context) -> list[Any]:
    """Return tensors and sizes among the attributes of a context that are not saved by `save_for_backward`."""
    own = {id(value) for value in context.to_save}
    found: dict[int, Any] = {}
    hidden = ("to_save", "dirty_tensors", "non_differentiable", "needs_input_grad")
    for value in tree_leaves([value for name, value in vars(context).items() if name not in hidden]):
        if isinstance(value, torch.Tensor | torch.SymInt) and id(value) not in own:
            found[id(value)] = value
    return list(found.values())


@dataclass
class _Recording:
    """One application being recorded.

    Attributes:
        function: the user's class.
        args: those of `apply`, defaults bound.
        has_setup: whether the class defines `setup_context`.
        in_eager: per argument, whether it requires grad in eager; None: that is not known.
        asked: the tensors of which the function is fixed to whether they require grad, and what depends on it.
    """

    function: Any
    args: tuple[Any, ...]
    has_setup: bool
    in_eager: Sequence[bool] | None = None
    asked: Sequence[tuple[torch.Tensor, Literal["outputs", "gradients"]]] = ()
    result: Any = None
    outputs: list[torch.Tensor] = field(default_factory=list)
    saved: list[torch.Tensor] = field(default_factory=list)
    stashed: list[Any] = field(default_factory=list)
    subgraphs: list[torch.fx.GraphModule | None] = field(default_factory=list)
    described: AppliedFunction | None = None

    @property
    def operands(self) -> list[torch.Tensor]:
        return [arg for arg in self.args if isinstance(arg, torch.Tensor)]

    def trace(self, ctx: Any, *args: Any) -> Any:
        """Trace all subgraphs, copy the function's marks to the real context, and return its result."""
        needed = NeededGradients(is_differentiable(arg) for arg in self.args)
        try:
            with attempt("custom autograd function"):
                context = self._trace(needed)
            read, count = needed.read, len(self.outputs)
            depends = dependence(self._trace_together, self.args, count, read) if read else None
        except ExportFailed:
            if not needed.read:
                raise
            depends = "outputs"
        if depends is not None:
            if self.in_eager is None:
                raise NotRepresentable("what it computes depends on `ctx.needs_input_grad` within a part of the model")
            here = [isinstance(arg, torch.Tensor) and arg.requires_grad for arg in self.args]
            needed = NeededGradients(self.in_eager if depends == "outputs" else here)
            context = self._trace(needed)
            self.asked = [(self.args[i], depends) for i in needed.read if isinstance(self.args[i], torch.Tensor)]
        for tensor in context.dirty_tensors:  # pyrefly: ignore[unbound-name] (`depends` says so)
            if not any(tensor is operand for operand in self.operands):
                raise NotRepresentable("it marks a tensor as dirty that is no input")
        ctx.mark_dirty(*context.dirty_tensors)
        ctx.mark_non_differentiable(*context.non_differentiable)
        return self.result

    def _trace(self, needed: NeededGradients) -> _Context:
        context = _Context(self.function, needed)
        self.subgraphs = [
            trace_subgraph(lambda *_: self._run_forward(context), self.operands, keeps_frame=is_user_frame)
        ]
        self.described = self._describe(context)
        self.subgraphs += self._trace_backwards(context, self.described)
        return context

    def _trace_together(self, needed: NeededGradients) -> torch.fx.GraphModule:
        """Return one graph of the outputs, and of all gradients for each pattern of defined gradients."""
        assert self.described is not None
        twin, needs_some = _Recording(self.function, self.args, self.has_setup), needed.some
        context, grads = _Context(self.function, needed), [torch.empty_like(output) for output in self.outputs]
        patterns = zip(self._patterns(grads, self.described), self.subgraphs[1:], strict=True)
        traced = [tangents for tangents, subgraph in patterns if subgraph is not None and needs_some]

        def run(*_: Any) -> list[Any]:
            twin._run_forward(context)
            with _in_a_backward(grads, self.outputs[0].device):
                return [*twin.outputs, *[each for tangents in traced for each in twin._gradients(context, tangents)]]

        return trace_subgraph(run, [*self.operands, *grads], keeps_frame=is_user_frame)

    def _run_forward(self, context: _Context) -> list[Any]:
        if self.has_setup:
            self.result = self.function.forward(*self.args)
            self.function.setup_context(context, self.args, self.result)
        else:
            self.result = self.function.forward(context, *self.args)
        results = self.result if isinstance(self.result, tuple) else (self.result,)
        self.outputs = [value for value in results if isinstance(value, torch.Tensor)]
        self.saved = [value for value in context.to_save if value is not None]
        self.stashed = _stashed(context)
        return [*self.outputs, *self.saved, *self.stashed]

    def _describe(self, context: _Context) -> AppliedFunction:
        def marked(values: Sequence[Any], marks: Sequence[Any]) -> list[int]:
            return [index for index, value in enumerate(values) if any(value is mark for mark in marks)]

        discrete = [value for value in self.outputs if not (value.is_floating_point() or value.is_complex())]
        return AppliedFunction(
            outputs=len(self.outputs),
            saved=len(self.saved),
            dirty=marked(self.operands, context.dirty_tensors),
            nondifferentiable=marked(self.outputs, [*context.non_differentiable, *discrete]),
            materializes=context.materialize_grads,
            once=_is_once_differentiable(self._backward()),
        )

    def _backward(self) -> Callable[..., Any]:
        inherited = torch.autograd.Function.vjp
        return self.function.backward if self.function.vjp is inherited else self.function.vjp

    def _patterns(
        self, grads: Sequence[torch.Tensor], described: AppliedFunction
    ) -> Iterator[Sequence[torch.Tensor | None]]:
        """Yield the gradients of outputs, with None for undefined ones, that the backward is traced for."""
        if described.materializes:
            yield grads
            return
        places = [index for index in range(len(grads)) if index not in described.nondifferentiable]
        if 1 << len(places) > _MAX_PATTERNS:
            raise NotRepresentable(f"it takes undefined gradients of {len(places)} outputs")
        # The first output's gradient is the lowest bit.
        for pattern in itertools.product((False, True), repeat=len(places)):
            defined = {place for place, is_defined in zip(reversed(places), pattern, strict=True) if is_defined}
            yield [grad if index in defined else None for index, grad in enumerate(grads)]

    def _trace_backwards(self, context: _Context, described: AppliedFunction) -> list[torch.fx.GraphModule | None]:
        patterns = list(self._patterns([torch.empty_like(output) for output in self.outputs], described))
        if _order.get() == _MAX_ORDER or not context.needs_input_grad.some:
            return [None] * len(patterns)
        subgraphs: list[torch.fx.GraphModule | None] = []
        for tangents in patterns:
            try:
                with attempt("backward of a custom autograd function"):
                    subgraphs.append(self._trace_backward(context, tangents))
            except ExportFailed:
                # A backward that needs a missing gradient raises in eager; a missing subgraph raises too.
                if tangents is patterns[-1]:
                    raise
                subgraphs.append(None)
        return subgraphs

    def _trace_backward(self, context: _Context, grads: Sequence[torch.Tensor | None]) -> torch.fx.GraphModule:
        defined = [grad for grad in grads if grad is not None]
        further = [*self.saved, *self.stashed]
        return traced_backward(lambda *_: self._gradients(context, grads), defined, further, self.outputs[0].device)

    def _gradients(self, context: _Context, grads: Sequence[torch.Tensor | None]) -> list[Any]:
        """Return what the backward returns for the operands."""
        results = self.result if isinstance(self.result, tuple) else (self.result,)
        own = iter(grads)
        full = [next(own) if isinstance(value, torch.Tensor) else None for value in results]
        token = _order.set(_order.get() + 1)
        try:
            returned = self._backward()(context, *full)
        finally:
            _order.reset(token)
        returned = returned if isinstance(returned, tuple) else (returned,)
        surplus = returned[len(self.args) :]
        if len(returned) < len(self.args) or any(gradient is not None for gradient in surplus):
            raise NotRepresentable(f"its backward returns {len(returned)} gradients for {len(self.args)} inputs")
        pairs = zip(self.args, returned[: len(self.args)], strict=True)
        return [gradient for arg, gradient in pairs if isinstance(arg, torch.Tensor)]


def traced_backward(
    function: Callable[..., list[Any]], grads: Sequence[torch.Tensor], further: Sequence[Any], device: torch.device
) -> torch.fx.GraphModule:
    """Trace a function of gradients and further tensors and sizes as a backward on a device; it returns a list."""
    with _in_a_backward(grads, device):
        return trace_subgraph(function, [*grads, *further], keeps_frame=is_user_frame)


@contextlib.contextmanager
def _in_a_backward(grads: Sequence[torch.Tensor], device: torch.device) -> Iterator[None]:
    """Run the block as a backward, outside of the model's regions and of autocast.

    Gradients may have any layout: `is_contiguous` says no, and `contiguous` is recorded.
    """
    tensor = torch.Tensor
    read_is_contiguous, read_stride = tensor.is_contiguous, tensor.stride

    def contiguous(self: torch.Tensor, memory_format: torch.memory_format = torch.contiguous_format) -> torch.Tensor:
        return torch.ops.aten.contiguous.default(self, memory_format=memory_format)

    def is_contiguous(self: torch.Tensor, *args: Any, **kwargs: Any) -> bool:
        return not any(self is grad for grad in grads) and read_is_contiguous(self, *args, **kwargs)

    def stride(self: torch.Tensor, *args: Any) -> Any:
        if any(self is grad for grad in grads) and is_user_file(caller().f_code.co_filename):
            raise NotRepresentable("its backward reads the strides of a gradient")
        return read_stride(self, *args)

    layout = "Trace a backward for gradients of every layout"
    patches = [Patch(tensor, each.__name__, each, layout) for each in (contiguous, is_contiguous, stride)]
    with traced_as(**BACKWARD), patched(*patches), torch.autocast(device.type, enabled=False):
        yield


def _is_once_differentiable(backward: Any) -> bool:
    while hasattr(backward, "__wrapped__"):
        if backward.__code__ is _ONCE:
            return True
        backward = backward.__wrapped__
    return False


_ONCE = once_differentiable(lambda ctx: None).__code__


def record_application(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Record the application of a custom function, a class, as one node of the current trace; return its result.

    Raises:
        NotRepresentable: a node cannot hold it; nothing was recorded.
    """
    has_setup = function.setup_context is not torch.autograd.Function.setup_context
    if has_setup:
        bound = inspect.signature(function.forward).bind(*args, **kwargs)
        bound.apply_defaults()
        args, kwargs = bound.args, bound.kwargs
    if kwargs:
        raise NotRepresentable("it takes keyword arguments")
    questions = current_questions.get()
    in_eager = None if traces_subgraph() else [isinstance(a, torch.Tensor) and questions.answer(a) for a in args]
    recording = _Recording(function, args, has_setup, in_eager)
    recorded: Any = type(function.__name__, (torch.autograd.Function,), {"forward": staticmethod(recording.trace)})
    with tracing_paused() as tracer:
        result = recorded.apply(*args)
        results = result if isinstance(result, tuple) else (result,)
        outputs = [value for value in results if isinstance(value, torch.Tensor)]
        subgraphs = recording.subgraphs
        additional = closed([subgraph for subgraph in subgraphs if subgraph is not None])
        assert recording.described is not None
        operands = (recording.operands, additional, *recording.described)
        record_call(tracer, apply_function, (subgraphs[0], subgraphs[1:], *operands), outputs)
    for tensor, depends in recording.asked:
        _ = questions.ask(tensor) if depends == "outputs" else questions.ask_for_gradients([tensor])
    return result


def closed(subgraphs: Sequence[torch.fx.GraphModule]) -> list[torch.Tensor]:
    """Turn the tensors that subgraphs close over into further inputs, and return them; make grad modes relative."""
    additional = lift_tensors(subgraphs)
    for subgraph in subgraphs:
        make_relative(subgraph.graph)
        subgraph.recompile()
    return additional


def refuse_bound(function: type) -> None:
    """Refuse an application by a bound `apply` that a trace cannot see."""
    name = function.__qualname__
    raise ExportFailed(
        f"{user_line()}the model calls a bound `apply` of the custom autograd function `{name}`, which no trace sees "
        f"from torch 2.14 on. Call `{name}.apply`, or bind it in a module or as an attribute of the model"
    )
