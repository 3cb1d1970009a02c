"""Private names of torch, unchanged, each with its purpose; `calls.py` has those that need no compiler's import."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch._refs.nn.functional

# Torch's own definitions of operators in Python.
from torch._decomp import decompositions

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

# Targets of nodes of a pre-dispatch graph, beside functions that switch modes.
from torch._ops import HigherOrderOperator, OpOverload
from torch.fx.experimental.symbolic_shapes import (
    GuardOnDataDependentSymNode,
    ShapeEnv,
    free_unbacked_symbols,
    statically_known_true,
)
from torch.utils._pytree import tree_leaves
from torch.utils._sympy.numbers import int_oo

from aotexport.process.objects import namespace_of

__all__ = [
    "AutogradFunctionApply",
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
    "int_oo",
    "make_fake_inputs",
    "statically_known_true",
]

# The function transforms that are active.
TRANSFORMS: Any = torch._C._functorch  # type: ignore[attr-defined]

DispatchKey: Any = torch._C.DispatchKey
SET_GRAD_ENABLED = torch._C._set_grad_enabled
ENTER_AUTOCAST = torch.amp.autocast_mode._enter_autocast
EXIT_AUTOCAST = torch.amp.autocast_mode._exit_autocast


MATH_FUNCTIONS: dict[str, Callable[[Any], Any]] = {name: getattr(torch, f"_sym_{name}") for name in ("sqrt", "log2")}
"""Functions of `math` from a number to a float, for symbolic numbers."""

_DEFINITIONS = (
    (torch._refs, ("diag", "diag_embed", "diagonal", "istft", "tril_indices", "triu_indices", "unfold")),
    (torch._refs.nn.functional, ("pixel_shuffle", "pixel_unshuffle")),
    (decompositions, ("affine_grid_generator", "im2col")),
)
batch_norm: Any = decompositions.native_batch_norm_helper
nll_loss: Any = decompositions.nll_loss_forward
silu_backward: Any = decompositions.silu_backward
mish_backward: Any = decompositions.mish_backward
_max_pool: Any = decompositions._max_pool_nd_with_indices
REFERENCES: dict[Any, Callable[..., Any]] = {
    **{name: getattr(module, name) for module, names in _DEFINITIONS for name in names},
    **{f"max_pool{axes}d_with_indices": functools.partial(_max_pool, n_dim=axes) for axes in (1, 2, 3)},
    **dict.fromkeys((torch.stft, torch.Tensor.stft), torch._refs.stft),
}
"""Torch's functions in terms of others that take symbolic numbers, by the operator's name or the function."""


def tensor_of_numbers(data: Any, *, copy: bool = True, **options: Any) -> torch.Tensor:
    """Return the result of `torch.tensor` for (nested lists of) numbers, including symbolic ones."""
    return torch._refs.tensor(data, **options)


def custom_operator_module(name: str) -> str | None:
    """Return the Python module that registered the custom operator `namespace::base.overload`, if that is known.

    Operators of a compiled library count as registered by the package of their namespace's name that holds the library.
    """
    definition = OPDEFS.get(name.partition(".")[0])
    if definition is None:
        namespace = name.partition("::")[0]
        folders = namespace_of(sys.modules.get(namespace)).get("__path__", ())
        inside = any(
            Path(library).is_relative_to(folder) for library in torch.ops.loaded_libraries for folder in folders
        )
        return namespace if inside else None
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
    return operator.has_kernel_for_dispatch_key(DispatchKey.CPU)


def has_sizes_of_data(node: torch.fx.Node) -> bool:
    """Return whether the value of a node has, or is, a data-dependent size."""
    values = tree_leaves(node.meta.get("val"))
    return any(free_unbacked_symbols(v) for v in values if isinstance(v, torch.Tensor | torch.SymInt | torch.SymFloat))


def has_autocast_kernel(operator: OpOverload, device_type: str) -> bool:
    """Return whether autocast casts the operands of an operator on devices of a type; True: nobody knows.

    Composite operators of several tensors may call others that it casts, as `einsum` and `lstm` do; norms call none.
    """
    key = getattr(DispatchKey, f"Autocast{device_type.upper()}", None)
    if key is None or operator.has_kernel_for_dispatch_key(key):
        return True
    tensors = "".join(str(argument.type) for argument in operator._schema.arguments)
    several = tensors.count("Tensor") > 1 or "List[Tensor]" in tensors
    is_norm = operator._schema.name.endswith("_norm")
    return several and not is_norm and operator.has_kernel_for_dispatch_key(DispatchKey.CompositeImplicitAutograd)
