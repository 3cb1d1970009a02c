"""Private names of torch, unchanged, each with its purpose, and torch's kinds of declared dimensions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch._refs

# Fake tensors with a shape environment that knows the user's dynamic dimensions.
from torch._export.non_strict_utils import make_fake_inputs

# The metadata of functional graphs.
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

# Dynamo's form of custom autograd functions in code that torch compiles (branches of `torch.cond`).
from torch._functorch.autograd_function import AutogradFunctionApply

# Custom operators with the functions that define them, to tell the user which module to import.
from torch._library.custom_ops import OPDEFS
from torch._library.triton import triton_ops_to_kernels
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

# Dynamo's capture, before custom autograd functions are transformed.
from torch.export._trace import _export_to_torch_ir as export_to_torch_operators

# The user's declarations of dynamic sizes and integers: named dimensions, and hints (`Dim.DYNAMIC`, `Dim.AUTO`).
from torch.export.dynamic_shapes import _DimHint, _DimHintType, _StaticDim
from torch.fx.experimental.symbolic_shapes import (
    ConstraintViolationError,
    GuardOnDataDependentSymNode,
    ShapeEnv,
    free_unbacked_symbols,
    statically_known_true,
)

# Containers that torch's tree utilities know and this package does not (caches of model libraries).
from torch.utils._pytree import SUPPORTED_NODES, tree_leaves, tree_map
from torch.utils._sympy.numbers import int_oo

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
    "custom_operator_module",
    "export_to_torch_operators",
    "has_sizes_of_data",
    "int_oo",
    "is_dimension",
    "is_fixed_dimension",
    "is_required_dimension",
    "make_fake_inputs",
    "runs_triton",
    "statically_known_true",
    "tensor_of_numbers",
    "tree_leaves",
    "tree_map",
    "triton_runs_on_cpu",
]

# Torch's own method, also while it is patched.
REQUIRES_GRAD = torch._C.TensorBase.requires_grad_

# The function transforms that are active.
TRANSFORMS: Any = torch._C._functorch  # type: ignore[attr-defined]

# Targets of nodes of a pre-dispatch graph, beside operators.
OpOverload = torch._ops.OpOverload
HigherOrderOperator = torch._ops.HigherOrderOperator
SET_GRAD_ENABLED = torch._C._set_grad_enabled
ENTER_AUTOCAST = torch.amp.autocast_mode._enter_autocast
EXIT_AUTOCAST = torch.amp.autocast_mode._exit_autocast


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
    """Return the result of `torch.tensor` for (nested lists of) numbers, including symbolic ones."""
    return torch._refs.tensor(data, **options)


def custom_operator_module(name: str) -> str | None:
    """Return the Python module that registered the custom operator `namespace::base.overload`, if torch knows it."""
    definition = OPDEFS.get(name.partition(".")[0])
    if definition is None:
        return None
    function = definition._init_fn
    if function.__module__ == "torch._library.triton":
        # `triton_op` wraps the function, which is also the fake kernel.
        function = definition._abstract_fn
    return getattr(function, "__module__", None)


def runs_triton(target: Any) -> bool:
    """Return whether the target of a node is an operator that `torch.library.triton_op` defined."""
    return isinstance(target, OpOverload) and target._schema.name in triton_ops_to_kernels


def triton_runs_on_cpu(operator: Any) -> bool:
    """Return whether an operator with Triton kernels has a kernel for CPUs."""
    return "cpu" in OPDEFS[operator._schema.name]._backend_fns


def has_sizes_of_data(node: torch.fx.Node) -> bool:
    """Return whether the value of a node has, or is, a data-dependent size."""
    values = tree_leaves(node.meta.get("val"))
    return any(free_unbacked_symbols(v) for v in values if isinstance(v, torch.Tensor | torch.SymInt | torch.SymFloat))


def has_autocast_kernel(operator: OpOverload, device_type: str) -> bool:
    """Return whether autocast casts the operands of an operator on devices of a type; True: nobody knows."""
    key = torch._C._parse_dispatch_key(f"Autocast{device_type.upper()}")
    return key is None or torch._C._dispatch_has_kernel_for_dispatch_key(operator.name(), key)
