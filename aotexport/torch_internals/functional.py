"""Capture of functional graphs by AOTAutograd."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
import torch._functorch.config as functorch_config
from torch._decomp.decompositions_for_rng import PhiloxStateTracker
from torch._functorch._aot_autograd.descriptors import TangentAOTInput
from torch._functorch._aot_autograd.schemas import ViewAndMutationMeta

# AOTAutograd's capture with descriptors: the route with torch.compile's full semantics.
from torch._functorch.aot_autograd import aot_export_joint_with_descriptors

# The tracing context gives AOTAutograd the fake mode and shape environment to use.
from torch._guards import TracingContext, tracing
from torch._library.simple_registry import singleton as registry
from torch._subclasses.fake_tensor import FakeTensorMode

# Traced graphs are read and interpreted; lazy graph modules generate Python code only when called.
from torch.fx._lazy_graph_module import _use_lazy_graph_module

from aotexport.process.patches import Patch, patched
from aotexport.torch_internals.names import OpOverload
from aotexport.torch_internals.patches import convolution_choice_unguarded, exporting, fake_kernels
from aotexport.torch_internals.tracing import layouts_unnoted


@dataclass(frozen=True)
class FunctionalCapture:
    """A functional graph, joint or for inference, with AOTAutograd's metadata of mutations and aliases."""

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
    launches: bool = False,
) -> FunctionalCapture:
    """Capture `function`, of flat tensors, as a functional graph through AOTAutograd.

    Args:
        function: the function.
        fakes: fake tensors of `fake_mode`, one per input.
        fake_mode: their mode; its shape environment is used further.
        kernels: see `fake_kernels`.
        grad: capture forward and backward; False: forward alone.
        launches: decompose operators of `torch.library.triton_op` to launches of their kernels.
    """
    with (
        _random_state_untracked(),
        contextlib.ExitStack() as stack,
        exporting(),
        _use_lazy_graph_module(True),
        convolution_choice_unguarded(fake_mode),
        tracing(TracingContext(fake_mode)),
        torch.set_grad_enabled(grad),
        _linalg_errors_unordered(),
        _effects_kept(),
        fake_kernels(kernels),
        contextlib.nullcontext() if launches else layouts_unnoted(),
        functorch_config.patch(decompose_custom_triton_ops=launches, functionalize_rng_ops=False),
    ):
        joint = aot_export_joint_with_descriptors(stack, _Root(function), tuple(fakes), {}, ignore_shape_env=True)
        return FunctionalCapture(joint.graph_module, joint._aot_state.fw_metadata)


def _random_state_untracked() -> AbstractContextManager[None]:
    """Make no tensors for a random state that nothing reads: a tenth of the export of a small BERT."""
    reason = "Make no tensors for a random state that is not functionalised"
    return patched(Patch(PhiloxStateTracker, "reset", staticmethod(lambda: None), reason))


def _linalg_errors_unordered() -> contextlib.AbstractContextManager[None]:
    """Trace linear algebra's checks for errors as plain operators: their order needs no token."""
    effect = registry.find("aten::_linalg_check_errors").effect
    return patched(Patch(effect, "_effect", None, "Leave checks of linear algebra without tokens for their order"))


def _effects_kept() -> contextlib.AbstractContextManager[None]:
    """Keep operators without a used result: random ones advance the generator, others check for errors."""
    original = torch.fx.Graph.eliminate_dead_code

    def eliminate(self: torch.fx.Graph, is_impure_node: Any = None) -> bool:
        def keeps(node: torch.fx.Node) -> bool:
            draws = torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
            checks = isinstance(node.target, OpOverload) and not node.target._schema.returns
            return draws or checks or (node.is_impure() if is_impure_node is None else is_impure_node(node))

        return original(self, keeps)

    reason = "Keep random operators and checks whose results nothing uses"
    return patched(Patch(torch.fx.Graph, "eliminate_dead_code", eliminate, reason))


def tangent_descriptor(node: torch.fx.Node) -> TangentAOTInput | None:
    """Return the descriptor of a placeholder that is a tangent, else None."""
    descriptor = node.meta.get("desc")
    return descriptor if isinstance(descriptor, TangentAOTInput) else None
