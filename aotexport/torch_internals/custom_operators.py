"""Custom operators that are written in Python, with the functions that implement them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

# The functions that define operators, and the keys that have Python kernels.
from torch._library.custom_ops import OPDEFS
from torch._library.triton import triton_ops_to_kernels
from torch._library.utils import fill_defaults
from torch.library import _impls

from aotexport.torch_internals.names import DispatchKey, OpOverload

_TORCHS = ("aten", "prims", "prim", "inductor", "quantized", "_test")
"""Namespaces of operators that torch ships."""
_COMPOSITE, _EXPLICIT = "CompositeImplicitAutograd", "CompositeExplicitAutograd"
_AUTOGRAD = "AutogradCPU"


@dataclass(frozen=True)
class PythonOperator:
    """The implementation of an operator.

    Attributes:
        kernel: takes its arguments, below autograd.
        is_composite: whether the kernel runs above autograd instead, which sees its operators.
        has_autograd: whether torch makes an autograd function of it.
        setup_context: the registered function that saves values for backward.
        backward: the registered backward; None: a backward raises.
    """

    kernel: Callable[..., Any]
    is_composite: bool = False
    has_autograd: bool = False
    setup_context: Callable[..., Any] | None = None
    backward: Callable[..., Any] | None = None


def python_operators() -> dict[OpOverload, PythonOperator]:
    """Return the currently registered custom operators that are written in Python, those of Triton kernels aside."""
    definitions = {name: each for name, each in dict(OPDEFS).items() if name not in triton_ops_to_kernels}
    found = {
        each._opoverload: PythonOperator(
            each._backend_fns.get("cpu") or each._backend_fns.get(None) or each._init_fn,
            has_autograd=True,
            setup_context=each._setup_context_fn,
            backward=each._backward_fn,
        )
        for each in definitions.values()
    }
    return _with_registered_kernels(frozenset(_impls), frozenset(definitions)) | found


@functools.lru_cache(maxsize=1)
def _with_registered_kernels(kernels: frozenset[str], definitions: frozenset[str]) -> dict[OpOverload, PythonOperator]:
    """Return custom operators with kernels of `torch.library` (`namespace/operator/key`), without `definitions`."""
    found: dict[OpOverload, PythonOperator] = {}
    keys: dict[str, set[str]] = {}
    for kernel in kernels:
        namespace, name, key = kernel.split("/")
        if namespace not in _TORCHS:
            keys.setdefault(f"{namespace}::{name}", set()).add(key)
    for name, of_operator in keys.items():
        operator = _find(name)
        if operator is not None and name not in definitions:
            described = _of_kernels(operator, of_operator)
            if described is not None:
                found[operator] = described
    return found


def _of_kernels(operator: OpOverload, keys: set[str]) -> PythonOperator | None:
    """Return the implementation of an operator with Python kernels for these keys; None: a trace would lose some."""
    key = next((key for key in (_COMPOSITE, _AUTOGRAD, "CPU", _EXPLICIT) if key in keys), None)
    # A kernel for autograd on several devices may do anything.
    if key is None or (key not in (_COMPOSITE, _AUTOGRAD) and any(key.startswith("Autograd") for key in keys)):
        return None
    # A mode for functions sees what the kernel calls, and not the call of the kernel.
    kernel = functools.partial(operator.redispatch, torch._C.DispatchKeySet(getattr(DispatchKey, key)))
    return PythonOperator(kernel, is_composite=key in (_COMPOSITE, _AUTOGRAD))


def _find(name: str) -> OpOverload | None:
    namespace, _, rest = name.partition("::")
    base, _, overload = rest.partition(".")
    packet = getattr(getattr(torch.ops, namespace), base, None)
    return getattr(packet, overload or "default", None)


def filled(
    operator: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a call with the defaults that it left out."""
    args, kwargs = fill_defaults(operator._schema, args, kwargs)
    return tuple(args), dict(kwargs)
