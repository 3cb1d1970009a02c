"""Change torch for the time of a capture's block; every change is undone when the block ends."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any

import torch

# Torch keeps tables of its functions from the first use on, see below.
from torch._dynamo.variables.builtin import BuiltinVariable
from torch._dynamo.variables.torch import TorchInGraphFunctionVariable, get_overridable_functions

# Operators whose result sizes fake kernels do not know.
from torch._library.fake_impl import FakeImplCtx, set_ctx_getter
from torch._subclasses.fake_impls import op_implementations_checks
from torch._subclasses.fake_tensor import FakeTensorMode

from aotexport.process.patches import Patch, patched
from aotexport.torch_internals.general_sizes import is_row_major

_as_in_eager: ContextVar[bool] = ContextVar("_as_in_eager", default=False)

# Made while functions are patched, these would hold the patches, and `with torch.device(...)` and torch's compiler
# would not know torch's own functions from then on.
get_overridable_functions()
BuiltinVariable._constant_fold_functions()
TorchInGraphFunctionVariable._get_handlers()


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


def masks_unread() -> contextlib.AbstractContextManager[None]:
    """Keep transformer layers from comparing a mask with the causal one, which branches on values.

    The layers then use a causal mask too, in place of the kernels' own causal option.
    """
    unread = lambda mask, is_causal=None, size=None: is_causal is True  # noqa: E731
    reason = "Keep transformer layers from reading the values of masks"
    return patched(Patch(torch.nn.modules.transformer, "_detect_is_causal_mask", unread, reason))


@contextlib.contextmanager
def onednn_disabled() -> Iterator[None]:
    """Hide oneDNN from torch's choice of kernels; the public flags warn, or may be forbidden to set."""
    before = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(before)


def convolution_choice_unguarded(fake_mode: FakeTensorMode) -> contextlib.AbstractContextManager[None]:
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
        return None if all(map(is_row_major, (image, weight))) else layout(image, weight, kernel)

    reason = "Hold no sizes to those for which torch picks the same kernel of a convolution"
    return patched(
        Patch(torch._C, "_select_conv_backend", unguarded, reason),
        Patch(torch._C, "_conv_determine_backend_memory_format", general, reason),
    )


@contextlib.contextmanager
def fake_kernels(kernels: Mapping[Any, Callable[..., Any]]) -> Iterator[None]:
    """Let fake tensors use `kernels` for operators that torch refuses as data-dependent."""

    def takes(operator: Any) -> bool:
        return operator in kernels

    def run(mode: FakeTensorMode, operator: Any, *args: Any, **kwargs: Any) -> Any:
        context = FakeImplCtx(mode, operator)
        with set_ctx_getter(lambda: context), mode:
            return kernels[operator](*args, **kwargs)

    op_implementations_checks.insert(0, (takes, run))  # pyrefly: ignore[bad-argument-type]
    try:
        yield
    finally:
        op_implementations_checks.remove((takes, run))  # pyrefly: ignore[bad-argument-type]


def constants_in_branches() -> contextlib.AbstractContextManager[None]:
    """Let floats that branches and loops use be constants, also where the same code runs with another one later.

    Source: torch 2.13, `torch/_dynamo/variables/builder.py`, `wrap_symfloat`.
    """
    from torch._dynamo import config

    return config.patch(specialize_float=True)


def average_in_tensors() -> contextlib.AbstractContextManager[None]:
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

    return patched(Patch(layer, "forward", forward, "Keep the factor of a cumulative average a tensor"))
