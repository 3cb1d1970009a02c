"""What a model is at a moment, in every detail that its owner can see, to tell whether something changed it."""

import logging
import random
import types
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import nn

_OPAQUE = (type, types.ModuleType, types.CodeType, types.FrameType, types.BuiltinFunctionType, torch.Generator)
# A logger remembers which levels are on, and leads to those of the whole process.
_OPAQUE += (logging.Logger,)
_NUMBERS = (bool, int, float, complex, str, bytes, type(None))
_PATCHED = (torch, torch.Tensor, torch.autograd, torch.autograd.Function, torch.nn.functional, torch.random, nn.Module)


def snapshot(*roots: Any) -> dict[str, Any]:
    """Return what everything that can be reached from `roots` is, by its path, and torch's own state with it.

    Objects are told by their ids, so what a snapshot tells of must live as long as the snapshot.

    Args:
        roots: models, functions with what they close over, arguments.
    """
    found: dict[str, Any] = _surroundings()
    kept: list[Any] = []
    seen: set[int] = set()
    pending = [(f"root{index}", root) for index, root in enumerate(roots)]
    while pending:
        path, value = pending.pop()
        if isinstance(value, _NUMBERS):
            found[path] = repr(value)
            continue
        found[path] = id(value), type(value)
        if id(value) in seen or isinstance(value, _OPAQUE):
            continue
        seen.add(id(value))
        kept.append(value)
        if isinstance(value, torch.Tensor):
            found[f"{path} as a tensor"] = _tensor(value)
            kept.append(value.grad_fn)
        pending += [(f"{path}{step}", item) for step, item in _items(value)]
    found["kept alive"] = kept
    return found


def changes(before: dict[str, Any], after: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return what differs between two snapshots of the same roots, by path."""
    return {
        path: (before.get(path), after.get(path))
        for path in {**before, **after}
        if path != "kept alive" and before.get(path) != after.get(path) and not _is_lazy(path, before)
    }


def _is_lazy(path: str, before: dict[str, Any]) -> bool:
    """Return whether it is a name that torch adds to itself where it is used first."""
    return path not in before and path.startswith("torch.")


def _items(value: Any) -> Iterable[tuple[str, Any]]:
    if isinstance(value, torch.Tensor):
        return [(f".{name}", item) for name, item in vars(value).items()]
    if isinstance(value, dict):
        return [(f"[{key!r}]", dict.__getitem__(value, key)) for key in dict.keys(value)]
    if isinstance(value, list | tuple):
        return [(f"[{index}]", item) for index, item in enumerate(value)]
    if isinstance(value, types.FunctionType):
        if value.__module__.startswith(("torch.", "numpy")):
            return []
        named = [(f".{name}", value.__globals__[name]) for name in _names(value.__code__) if name in value.__globals__]
        cells = [(f"<{i}>", cell.cell_contents) for i, cell in enumerate(value.__closure__ or ()) if _is_filled(cell)]
        return [*named, *cells, (".__defaults__", value.__defaults__)]
    if isinstance(value, types.MethodType):
        return [(".__self__", value.__self__), (".__func__", value.__func__)]
    if type(value).__module__.startswith("torch.") and not isinstance(value, nn.Module):
        return []
    return [(".__dict__", vars(value))] if hasattr(value, "__dict__") else []


def _names(code: types.CodeType) -> set[str]:
    nested = [_names(constant) for constant in code.co_consts if isinstance(constant, types.CodeType)]
    return set(code.co_names).union(*nested)


def _is_filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:
        return False


def _tensor(tensor: torch.Tensor) -> tuple[Any, ...]:
    grad = tensor.grad if tensor.is_leaf else None
    strided = tensor.layout is torch.strided and not tensor.is_nested and type(tensor) in (torch.Tensor, nn.Parameter)
    return (
        *(tensor.shape, tensor.dtype, tensor.device, tensor.requires_grad, tensor.is_leaf, tensor.is_inference()),
        *(id(tensor.grad_fn) if tensor.grad_fn is not None else None, id(tensor._base), tensor._backward_hooks),
        None if tensor.is_inference() else tensor._version,
        None if grad is None else (id(grad), _bytes(grad)),
        (tensor.stride(), tensor.storage_offset(), tensor.data_ptr(), _bytes(tensor)) if strided else None,
    )


def _bytes(tensor: torch.Tensor) -> bytes:
    tensor = tensor.detach().resolve_conj().resolve_neg().cpu()
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def _surroundings() -> dict[str, Any]:
    kind, key, *rest = np.random.get_state()
    apply = vars(torch.autograd.Function)["apply"]
    return {
        "torch's generator": torch.get_rng_state().numpy().tobytes(),
        "Python's generator": random.getstate(),
        "NumPy's generator": (kind, key.tobytes(), *rest),  # type: ignore[union-attr]
        "grad mode": torch.is_grad_enabled(),
        "inference mode": torch.is_inference_mode_enabled(),
        "autocast": torch.is_autocast_enabled("cpu"),
        "autocast cache": torch.is_autocast_cache_enabled(),
        "default dtype": torch.get_default_dtype(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "attention fast path": torch.backends.mha.get_fastpath_enabled(),
        "modes": len(torch.overrides._get_current_function_mode_stack()),
        "compiling": (torch.compiler.is_compiling(), torch.compiler.is_exporting()),
        "apply": id(getattr(getattr(apply, "__func__", apply), "__code__", apply)),
        **{f"torch.{owner.__name__}.{name}": id(value) for owner in _PATCHED for name, value in vars(owner).items()},
    }
