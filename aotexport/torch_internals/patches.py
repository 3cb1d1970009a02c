"""Change torch for the time of a capture's block; every change is undone when the block ends."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any

import sympy
import torch
from torch import _debug_has_internal_overlap as internal_overlap  # type: ignore[attr-defined]
from torch import _refs
from torch._decomp import decompositions
from torch._guards import SLoc

# Operators whose result sizes fake kernels do not know.
from torch._library.fake_impl import FakeImplCtx, set_ctx_getter
from torch._prims_common import (
    extract_shape_from_varargs,
    infer_size,
    is_contiguous_or_false,
    make_contiguous_strides_for,
)
from torch._subclasses.fake_impls import op_implementations_checks
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental import _config as shape_config
from torch.fx.experimental import proxy_tensor, symbolic_shapes
from torch.fx.experimental.sym_node import SymNode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from aotexport.process.patches import Patch, patched


@contextlib.contextmanager
def fixed_symbols(shape_env: ShapeEnv, seen: Callable[[sympy.Symbol], None], line: Callable[[], str]) -> Iterator[None]:
    """Let a shape environment tell when it fixes sizes.

    Args:
        shape_env: of the trace.
        seen: called with every symbol when it is fixed to a number.
        line: returns the user's running line, which guards record, see `line_of`.
    """
    replace = shape_env._set_replacement

    def watched(symbol: sympy.Symbol, value: sympy.Expr, reason: str) -> None:
        if value.is_number:
            seen(symbol)
        replace(symbol, value, reason)

    with patched(
        Patch(shape_env, "_set_replacement", watched, "Record the line that holds a size to a number"),
        Patch(
            shape_env,
            "_get_sloc",
            lambda framework_loc=None: SLoc(framework_loc, line()),
            "Keep the line of the user's that makes a guard",
        ),
    ):
        yield


_as_in_eager: ContextVar[bool] = ContextVar("_as_in_eager", default=False)


@contextlib.contextmanager
def exporting_hidden() -> Iterator[None]:
    """Hide the current export from the model, so that its code runs as in eager."""
    token = _as_in_eager.set(True)
    try:
        yield
    finally:
        _as_in_eager.reset(token)


@contextlib.contextmanager
def exporting() -> Iterator[None]:
    """Let the model see the current export (`torch.compiler.is_exporting()`), as `torch.export` does."""
    if _as_in_eager.get():
        yield
        return
    reason = "Let the model see that it is exported"
    with patched(*[Patch(torch.compiler, f"_is_{flag}_flag", True, reason) for flag in ("compiling", "exporting")]):
        yield


@contextlib.contextmanager
def masks_unread() -> Iterator[None]:
    """Keep transformer layers from comparing a mask with the causal one, which branches on values.

    The layers then use a causal mask too, in place of the kernels' own causal option.
    """
    unread = lambda mask, is_causal=None, size=None: is_causal is True  # noqa: E731
    reason = "Keep transformer layers from reading the values of masks"
    with patched(Patch(torch.nn.modules.transformer, "_detect_is_causal_mask", unread, reason)):
        yield


@contextlib.contextmanager
def forward_mode_rules_hidden() -> Iterator[None]:
    """Hide the rules of forward-mode AD of custom autograd functions."""
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
    """Let torch choose the kernel of a convolution without guards on sizes.

    The graph keeps the operator, which chooses anew at every call, so a guard such as `batch < 16` would be needless.
    """
    choose: Any = torch._C._select_conv_backend
    layout: Any = torch._C._conv_determine_backend_memory_format  # type: ignore[attr-defined]
    environment = fake_mode.shape_env

    def unguarded(*args: Any, **kwargs: Any) -> Any:
        with environment.suppress_guards() if environment is not None else contextlib.nullcontext():
            return choose(*args, **kwargs)

    def general(image: torch.Tensor, weight: torch.Tensor, kernel: Any) -> Any:
        # An image of one pixel may have any layout: the result is laid out as its shape says.
        return None if all(map(_is_row_major, (image, weight))) else layout(image, weight, kernel)

    reason = "Hold no sizes to those for which torch picks the same kernel of a convolution"
    with patched(
        Patch(torch._C, "_select_conv_backend", unguarded, reason),
        Patch(torch._C, "_conv_determine_backend_memory_format", general, reason),
    ):
        yield


def _is_row_major(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is contiguous whatever its sizes are."""
    steps = zip(tensor.stride(), make_contiguous_strides_for(tensor.shape), strict=True)
    return all(symbolic_shapes.statically_known_true(step == expected) for step, expected in steps)


@contextlib.contextmanager
def dropout_between_layers() -> Iterator[None]:
    """Let the decompositions of recurrent networks draw the dropout between their layers, which they leave out.

    Source: torch 2.13, torch/_decomp/decompositions.py, `_rnn_helper`, whose condition for it holds for no layer.
    """
    original = decompositions._rnn_helper

    def helper(
        input: torch.Tensor, hidden: Any, params: Any, has_biases: bool, num_layers: int, dropout: float, *rest: Any
    ) -> tuple[torch.Tensor, list[Any]]:
        train, bidirectional, batch_first, layer = rest
        output = input.transpose(0, 1) if batch_first else input
        directions = 2 if bidirectional else 1
        states = []
        for index in range(num_layers):
            own = slice(index * directions, (index + 1) * directions)
            output, last = original(
                output, hidden[own], params[own], has_biases, 1, 0.0, train, bidirectional, False, layer
            )
            states += last
            if train and dropout and index < num_layers - 1:
                # Eager draws nothing if all elements are dropped.
                output = output.mul(output.new_zeros(())) if dropout == 1 else torch.dropout(output, dropout, True)
        return output.transpose(0, 1) if batch_first else output, states

    with patched(
        Patch(decompositions, "_rnn_helper", helper, "Draw the dropout between recurrent layers", "torch>=2.16")
    ):
        yield


@contextlib.contextmanager
def fake_kernels(kernels: Mapping[Any, Callable[..., Any]]) -> Iterator[None]:
    """Let fake tensors use `kernels` for operators that torch refuses as data-dependent."""

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


def sizes_from_zero() -> Patch:
    """Return a patch that lets fake kernels make results with no or one element by torch's old name for sizes of data.

    `create_unbacked_symint` has a minimum of 2, so that `nms` of torchvision would refuse images with one object.
    """

    def create_unbacked_symint(context: FakeImplCtx, *, min: int = 0, max: int | None = None) -> torch.SymInt:
        return context.new_dynamic_size(min=min, max=max)

    return Patch(FakeImplCtx, "create_unbacked_symint", create_unbacked_symint, "Let results have 0 or 1 elements")


@contextlib.contextmanager
def constants_in_branches() -> Iterator[None]:
    """Let numbers that branches and loops use be constants, also where code of one place uses other numbers later.

    Source: torch 2.13, `torch/_dynamo/variables/builder.py`, `wrap_symfloat`, `wrap_symint`.
    """
    from torch._dynamo import config

    with config.patch(specialize_float=True, specialize_int=True):
        yield


@contextlib.contextmanager
def average_in_tensors() -> Iterator[None]:
    """Keep the factor 1 / calls of batch normalization with a cumulative average (`momentum=None`) a tensor."""
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

    with patched(Patch(layer, "forward", forward, "Keep the factor of a cumulative average a tensor")):
        yield


def _asks_for_zero_or_one(condition: sympy.Basic) -> bool:
    special = (0, 1) if isinstance(condition, sympy.Eq | sympy.Ne) else (0, 1, 2)
    return isinstance(condition, sympy.core.relational.Relational) and any(side in special for side in condition.args)


@contextlib.contextmanager
def zero_and_one_symbolic(*, symbolic: bool) -> Iterator[None]:
    """Give dynamic sizes a symbol even if the example's is 0 or 1, values that torch would specialise on."""
    with shape_config.patch(backed_size_oblivious=symbolic):  # type: ignore[attr-defined]
        yield


@contextlib.contextmanager
def general_sizes_kept(assumed: Callable[[Any], None]) -> Iterator[None]:
    """Let torch take its general path if that is right for all sizes, instead of guarding on the example's.

    Torch's operators ask whether a size is 0 or 1, or a layout contiguous, with an answer that is always right as
    default (`guard_or_false`, `guard_or_true`); for sizes that have an example value they guard on it nevertheless.
    Here they guard only if the example takes a special path, but not because a size of it happens to be 0 or 1.

    Args:
        assumed: called with each condition (a sympy expression) that a trace assumed without a guard. Operators are
            right without it; the layouts and aliases of a trace may differ.
    """
    original = symbolic_shapes._guard_or
    reshapes = _Reshapes()

    def general(condition: Any, default: bool) -> bool:
        if reshapes.squeezes or not isinstance(condition, torch.SymBool) or not condition.node.has_hint():
            return original(condition, default)
        expression = condition.node.expr
        free = reshapes.running or _asks_for_zero_or_one(expression)
        if bool(condition.node.hint) is not default and not free:
            return original(condition, default)
        known = symbolic_shapes._static_eval_sym_bool(condition)
        if known is None:
            assumed(expression if default else sympy.Not(expression))
            return default
        return known

    reason = "Take torch's general path where it is right for all sizes"
    with patched(
        Patch(symbolic_shapes, "_guard_or", general, reason),
        Patch(torch, "_debug_has_internal_overlap", _overlap(internal_overlap), reason),
        *reshapes.patches(general),
    ):
        yield


class _Reshapes:
    """Lets reshapes copy where not all sizes let them be views, and views of contiguous tensors ask for no sizes.

    Source: torch 2.13, `torch/_refs/__init__.py`, `_reshape_view_helper`; `aten/src/ATen/TensorUtils.cpp`,
    `computeStride`.
    """

    OPERATORS = (torch.ops.aten.reshape.default, torch.ops.aten.flatten.using_ints)

    def __init__(self) -> None:
        self.running = self.squeezes = False

    def patches(self, general: Callable[[Any, bool], bool]) -> list[Patch]:
        """Return the patches.

        Args:
            general: answers a condition with its default, see `general_sizes_kept`.
        """
        view, call, guard = _refs._reshape_view_helper, proxy_tensor.proxy_call, SymNode.guard_bool
        drop, views = _refs.squeeze, False

        def guard_bool(node: Any, file: str, line: int) -> bool:
            if self.running and isinstance(node.expr, sympy.Eq | sympy.Ne) and 1 in node.expr.args:
                return general(torch.SymBool(node), isinstance(node.expr, sympy.Ne))
            return guard(node, file, line)

        def proxy_call(mode: Any, func: Any, *args: Any) -> Any:
            with self._set(running=self.running or func in self.OPERATORS):
                return call(mode, func, *args)

        def reshape_view_helper(tensor: torch.Tensor, *shape: Any, allow_copy: bool) -> torch.Tensor:
            nonlocal views
            with self._set(running=False):
                if is_contiguous_or_false(tensor):
                    sizes = infer_size(extract_shape_from_varargs(shape, validate=False), tensor.numel())
                    return tensor.as_strided(sizes, make_contiguous_strides_for(sizes))
                views = True
                try:
                    return view(tensor, *shape, allow_copy=allow_copy)
                finally:
                    views = False

        def squeeze(tensor: torch.Tensor, dim: Any = None) -> torch.Tensor:
            found = drop(tensor, dim)
            if not views or found.ndim < tensor.ndim:
                return found
            # Torch tries again until the axis is gone.
            with self._set(squeezes=True):
                return drop(tensor, dim)

        reason = "Hold no sizes of reshapes to other numbers than 1"
        return [
            Patch(SymNode, "guard_bool", guard_bool, reason),
            Patch(proxy_tensor, "proxy_call", proxy_call, reason),
            Patch(_refs, "_reshape_view_helper", reshape_view_helper, reason),
            Patch(
                _refs, "squeeze", squeeze, "Hold a size to 1 where a view drops its axis, which torch retries for ever"
            ),
        ]

    @contextlib.contextmanager
    def _set(self, **values: bool) -> Iterator[None]:
        before = dict(vars(self))
        vars(self).update(values)
        try:
            yield
        finally:
            vars(self).update(before)


def _is(size: Any, value: int) -> bool:
    return isinstance(size, int) and size == value


def _overlap(original: Callable[[torch.Tensor], int]) -> Callable[[torch.Tensor], int]:
    """Return whether elements share memory (1), as writes ask, or may (2), without asking whether they are dense."""

    def overlap(tensor: torch.Tensor) -> int:
        sizes = (*tensor.shape, *tensor.stride())
        if all(isinstance(size, int) for size in sizes):
            return original(tensor)
        expanded = [size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if _is(stride, 0)]
        return 2 if all(_is(size, 1) for size in expanded) else 1

    return overlap


def sizes_of_any_value() -> contextlib.AbstractContextManager[Any]:
    """Return a context in which a traced size of 0 or 1 is not fixed, as in torch's ONNX exporter."""
    return torch.fx.experimental._config.patch(backed_size_oblivious=True)  # type: ignore[attr-defined]
