"""Symbols, ranges and guards of dynamic sizes, read off the shape environment after all traces.

Nothing that a trace assumed is dropped: a guard on the user's symbols is stored and enforced at every call, and
one that contradicts what the user declared fails the export.
"""

from __future__ import annotations

from typing import Any

import sympy
import torch

from aotexport.capture.forward import ForwardCapture
from aotexport.encode.sizes import encode_size
from aotexport.errors import ExportFailed
from aotexport_runtime.schema.sizes import Dimension, SizeExpression

_UNBOUNDED = 1 << 62


def dimensions(forward: ForwardCapture, paths: list[str]) -> tuple[Dimension, ...]:
    """Return the symbols of the program's inputs.

    Args:
        forward: the traced program.
        paths: path per argument tensor, for errors.

    Raises:
        ExportFailed: the trace fixed a size that the user declared dynamic.
    """
    found: dict[str, Dimension] = {}
    derived: list[tuple[Any, int, int, Any]] = []
    for position, (binding, fake) in enumerate(zip(forward.bindings, forward.inputs, strict=True)):
        if binding.argument is None:
            continue
        axes = forward.fakes.axes[binding.argument] or {}
        for axis, size in enumerate(fake.shape):
            declared = axes.get(axis)
            if isinstance(size, int):
                _check_not_fixed(declared, size, paths[binding.argument], axis)
                continue
            expression = size.node.expr
            if isinstance(expression, sympy.Integer):
                _check_not_fixed(declared, int(expression), paths[binding.argument], axis)
            elif isinstance(expression, sympy.Symbol):
                if expression.name not in found:
                    found[expression.name] = _dimension(forward, expression, declared, position, axis)
            else:
                derived.append((expression, position, axis, declared))
    for expression, position, axis, _ in derived:
        free = [symbol for symbol in expression.free_symbols if symbol.name not in found]
        if len(free) == 1:
            found[free[0].name] = _solved(forward, expression, free[0], position, axis)
    return tuple(found.values())


def _check_not_fixed(declared: Any, size: int, path: str, axis: int) -> None:
    if isinstance(declared, type(torch.export.Dim("x"))) and not hasattr(declared, "value"):
        raise ExportFailed(
            f"`{path}`: axis {axis} was declared dynamic as `{declared.__name__}`, and the model works only for size "
            f"{size}. Give another example size, change the model, or leave this axis static"
        )


def _dimension(forward: ForwardCapture, symbol: Any, declared: Any, position: int, axis: int) -> Dimension:
    low, high = _range(forward, symbol)
    name = getattr(declared, "__name__", None) or symbol.name
    user_low = getattr(declared, "min", None)
    if low == 2 and isinstance(user_low, int) and user_low < 2:
        # The trace assumes sizes other than 0 and 1; verification runs the least size that the user declared.
        low = max(user_low, 0)
    return Dimension(symbol=symbol.name, name=name, min=low, max=high, input_index=position, axis=axis)


def _range(forward: ForwardCapture, symbol: Any) -> tuple[int, int | None]:
    bounds = forward.fakes.mode.shape_env.var_to_range[symbol]  # type: ignore[union-attr]
    low = int(bounds.lower) if bounds.lower.is_Integer else 0
    high = int(bounds.upper) if bounds.upper.is_Integer and int(bounds.upper) < _UNBOUNDED else None
    return low, high


def _solved(forward: ForwardCapture, expression: Any, symbol: Any, position: int, axis: int) -> Dimension:
    """Return the dimension of a symbol that occurs only as `factor * symbol + offset`."""
    factor = sympy.diff(expression, symbol)
    offset = sympy.expand(expression - factor * symbol)
    if not (factor.is_Integer and offset.is_Integer):
        raise ExportFailed(f"the size `{expression}` of an input cannot be solved for `{symbol}`")
    low, high = _range(forward, symbol)
    name = symbol.name.lstrip("_")
    return Dimension(
        symbol=symbol.name,
        name=name,
        min=low,
        max=high,
        input_index=position,
        axis=axis,
        factor=int(factor),
        offset=int(offset),
    )


def guards(forward: ForwardCapture, known: tuple[Dimension, ...]) -> tuple[SizeExpression, ...]:
    """Return what the traces assumed about the symbols beyond their ranges.

    Raises:
        ExportFailed: an assumption that the format cannot say.
    """
    environment = forward.fakes.mode.shape_env
    symbols = {dimension.symbol for dimension in known}
    encoded: list[SizeExpression] = []
    for guard in environment.guards:  # type: ignore[union-attr]
        expression: Any = guard.expr
        if expression in (sympy.true, True):
            continue
        if {symbol.name for symbol in expression.free_symbols} - symbols:
            continue
        record = encode_size(expression, or_none=True)
        if record is None:
            raise ExportFailed(f"the trace assumed `{expression}`, which a bundle cannot hold")
        if isinstance(record, SizeExpression) and record not in encoded:
            encoded.append(record)
    return tuple(encoded)
