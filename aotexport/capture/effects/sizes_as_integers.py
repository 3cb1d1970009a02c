"""Call decompositions in place of torch's functions that ask a symbolic number for its value, while a model is traced.

A size among their arguments would hold every call to the example's. Results equal torch's up to rounding.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from types import FunctionType
from typing import Any

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode, resolve_name
from torch.signal import windows

from aotexport.process.patches import Patch, patched
from aotexport.torch_internals.names import REFERENCES, tensor_of_numbers

_running: ContextVar[tuple[Any, ...]] = ContextVar("_running", default=())

_BODIES_SEEN = [
    Patch(module, name, lambda *args: False, "Show to a mode what torch's functions in Python call")
    for module in (functional, torch.functional, sys.modules[torch.Tensor.__module__])
    for name in ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")
    if hasattr(module, name)
]


def running_function() -> str | None:
    """Return the name of torch's function that the code of the model has called, and that has not returned."""
    running = _running.get()
    return f"`{resolve_name(running[0]) or getattr(running[0], '__name__', running[0])}`" if running else None


def holds_symbol(data: Any) -> bool:
    """Return whether a value is a symbolic number, or a list or tuple that holds one."""
    if isinstance(data, list | tuple):
        return any(map(holds_symbol, data))
    return isinstance(data, torch.SymInt | torch.SymFloat | torch.SymBool)


class SizesAsIntegers(TorchFunctionMode):
    """Call `FUNCTIONS` in place of torch's where an argument is a symbolic number."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call `func`, or what stands for it; see `torch.overrides`."""
        kwargs, running = kwargs or {}, _running.get()
        is_first = func not in running and holds_symbol([*args, *kwargs.values()])
        token = _running.set((*running, func))
        try:
            if is_first:
                # Torch's operators that take a generator take no symbolic sizes.
                kwargs = {key: value for key, value in kwargs.items() if (key, value) != ("generator", None)}
                name = getattr(func, "__name__", "")
                # Patched methods of tensors come as functions.
                by_name = not isinstance(func, FunctionType) or func is getattr(torch.Tensor, name, None)
                own = FUNCTIONS.get(name if by_name and name in FUNCTIONS else func, func)
                with self, patched(*_BODIES_SEEN):
                    found = own(*args, **kwargs)
                if found is not NotImplemented:
                    return found
            return func(*args, **kwargs)
        finally:
            _running.reset(token)


def _new_tensor(tensor: torch.Tensor, *data: Any, **options: Any) -> torch.Tensor:
    return tensor_of_numbers(*data, **dict[str, Any](dtype=tensor.dtype, device=tensor.device) | options)


def one_hot(classes: torch.Tensor, num_classes: Any = -1) -> Any:
    """Compute `one_hot` for a number of classes that is a size or, left out, follows from the values."""
    if isinstance(num_classes, int) and num_classes != -1:
        return NotImplemented
    count: Any = classes.max().item() + 1 if isinstance(num_classes, int) else num_classes
    torch._check(count >= 1)
    rows = classes.new_zeros((*classes.shape, count))
    return rows.scatter_(-1, classes.unsqueeze(-1), 1)


def _linspace(start: Any, end: Any, steps: Any, *, dtype: Any = None, **options: Any) -> Any:
    """Compute as the kernel for CPUs does, to the last bit in float32: only its step and results are of the dtype."""
    if not holds_symbol(steps) or isinstance(start, torch.Tensor) or isinstance(end, torch.Tensor):
        return NotImplemented
    dtype = dtype or torch.get_default_dtype()
    index = torch.arange(steps, dtype=torch.float64, **options)
    kept = dtype if dtype.is_floating_point else torch.float64
    step = torch.full((), (end - start) / torch.sym_max(steps - 1, 1), dtype=kept).to(index)
    return torch.where(index < torch.sym_max(steps // 2, 1), start + step * index, end - step * (steps - 1 - index)).to(
        dtype
    )


def _fftfreq(n: Any, d: float = 1.0, **options: Any) -> torch.Tensor:
    index = torch.arange(n, **options)
    return torch.where(index < (n + 1) // 2, index, index - n) / (n * d)


def _adaptive_avg_pool1d(values: torch.Tensor, output_size: Any) -> torch.Tensor:
    return functional.adaptive_avg_pool2d(values.unsqueeze(-2), (1, *_each(output_size, 1))).squeeze(-2)


def _each(value: Any, axes: int) -> Sequence[Any]:
    values = value if isinstance(value, list | tuple) else [value]
    return values if len(values) == axes else [*values] * axes


def _max_pool(axes: int, *args: Any, **options: Any) -> torch.Tensor:
    return REFERENCES[f"max_pool{axes}d_with_indices"](*args, **options)[0]


_AVERAGES = {"ceil_mode": False, "count_include_pad": True, "divisor_override": None}


def _avg_pool(
    axes: int, values: Any, kernel_size: Any, stride: Any = None, padding: Any = 0, *rest: Any, **named: Any
) -> Any:
    if {**_AVERAGES, **dict(zip(_AVERAGES, rest, strict=False)), **named} != _AVERAGES:
        return NotImplemented
    sizes, pads = _each(kernel_size, axes), _each(padding, axes)
    pooled = functional.pad(values, [pad for pad in reversed(pads) for _ in range(2)])
    for index, step in enumerate(_each(stride or sizes, axes)):
        pooled = pooled.unfold(values.dim() - axes + index, sizes[index], step)
    return pooled.sum([*range(-axes, 0)]) / math.prod(sizes)


FUNCTIONS: dict[Any, Callable[..., Any]] = {
    **REFERENCES,
    **dict.fromkeys(("tensor", "as_tensor", "asarray"), tensor_of_numbers),
    "new_tensor": _new_tensor,
    "fft_fftfreq": _fftfreq,
    "fft_rfftfreq": lambda n, d=1.0, **options: torch.arange(n // 2 + 1, **options) / (n * d),
    "hann_window": lambda n, periodic=True, **options: windows.hann(n, sym=not periodic, **options),
    "linspace": _linspace,
    "one_hot": one_hot,
    "adaptive_avg_pool1d": _adaptive_avg_pool1d,
    **{f"avg_pool{axes}d": functools.partial(_avg_pool, axes) for axes in (1, 2, 3)},
    **{f"max_pool{axes}d": functools.partial(_max_pool, axes) for axes in (1, 2, 3)},
}
"""What to call in place of torch's functions: by the operator's name, or of those in Python by the function."""
