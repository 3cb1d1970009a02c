"""Read symbols, ranges and guards of dynamic sizes off the shape environment after all traces.

No assumption of a trace is dropped: a guard on the user's symbols is stored and enforced at every call, and one that
contradicts the user's declaration fails the export.
"""

from __future__ import annotations

from collections.abc import Container, Iterable
from dataclasses import dataclass
from typing import Any

import sympy
import torch

from aotexport.capture.trace.declared_sizes import place
from aotexport.capture.trace.forward_capture import ForwardCapture
from aotexport.errors import ExportFailed
from aotexport.model.call import ExampleCall
from aotexport.torch_internals.calls import is_dimension, is_required_dimension
from aotexport.values.polynomials import holds_always
from aotexport.values.sizes import encode_size
from aotexport_runtime.schema.sizes import Dimension, SizeExpression

_UNBOUNDED = 1 << 62


class SizeFixed(ExportFailed):
    """A trace works only for the example's value of a size that the user declared dynamic."""


def dimensions(forward: ForwardCapture, paths: list[str]) -> tuple[Dimension, ...]:
    """Return the symbols of the program's inputs.

    Args:
        forward: the traced program.
        paths: path per argument tensor, for errors.

    Raises:
        ExportFailed: the format cannot express a size.
    """
    found: dict[str, Dimension] = {}
    derived: list[tuple[Any, _Place]] = []
    for at in _places(forward, paths):
        # An integer has a symbol of its own, even if the trace found it equal to another.
        expression = at.size.node._expr if at.axis is None else at.expression
        if isinstance(expression, sympy.Symbol):
            if expression.name not in found:
                found[expression.name] = _dimension(forward, expression, at, {each.name for each in found.values()})
        elif not isinstance(expression, sympy.Integer):
            derived.append((expression, at))
    for expression, at in derived:
        free = [symbol for symbol in expression.free_symbols if symbol.name not in found]
        if len(free) == 1:
            found[free[0].name] = _solved(forward, expression, free[0], at)
    return tuple(found.values())


@dataclass(frozen=True)
class _Place:
    """The place that a size is read from: axis `axis` of an input, or, with None, an integer input itself."""

    size: Any
    declared: Any
    position: int
    path: str
    axis: int | None

    @property
    def expression(self) -> Any:
        return self.size.node.expr if isinstance(self.size, torch.SymInt) else sympy.Integer(self.size)

    def __str__(self) -> str:
        return place(self.path, self.axis)


def _places(forward: ForwardCapture, paths: list[str]) -> list[_Place]:
    found: list[_Place] = []
    for position, (binding, fake) in enumerate(zip(forward.bindings, forward.inputs, strict=True)):
        if binding.argument is None:
            continue
        axes, path = forward.fakes.axes[binding.argument] or {}, paths[binding.argument]
        if isinstance(fake, torch.Tensor):
            found += [_Place(size, axes.get(axis), position, path, axis) for axis, size in enumerate(fake.shape)]
        else:
            found.append(_Place(fake, axes.get(0), position, path, None))
    return found


def check_not_fixed(forward: ForwardCapture, paths: list[str]) -> None:
    """Refuse a trace that fixes sizes which the user declared dynamic.

    Args:
        forward: the traced program.
        paths: path per argument, for errors.

    Raises:
        SizeFixed: names every such size, with the user's line that fixed it.
    """
    fixed: list[str] = []
    guarded, places = _guarded(forward), _places(forward, paths)
    for at in places:
        value = guarded.get(at.expression, at.expression)
        if not isinstance(value, sympy.Integer) or not is_required_dimension(at.declared):
            continue
        symbol = at.size.node._expr if isinstance(at.size, torch.SymInt) else None
        line, asked = forward.fakes.fixed_at.get(symbol, ""), forward.fakes.asked_by.get(symbol)
        name = f" as `{at.declared.__name__}`" if hasattr(at.declared, "__name__") else ""
        where = f"`{at.path}`" if at.axis is None else f"`{at.path}`: axis {at.axis}"
        noun, kind = ("value", "integer") if at.axis is None else ("size", "axis")
        why, helps = ".", f"Give another example {noun}, change the model"
        if asked is not None:
            why, helps = f", since {asked} asks for the number itself.", "Write it with operators that take sizes"
        fixed.append(
            f"{line}{where} was declared dynamic{name}, and the model works only for {noun} {value}{why} "
            f"{helps}, or leave this {kind} static{_way_out(at, value, places)}"
        )
    if fixed:
        raise SizeFixed("\n".join(fixed))


def _way_out(at: _Place, value: Any, places: Iterable[_Place]) -> str:
    """Return a clause that names the axes of the same size that were not declared: the model may need them equal."""
    same = [o for o in places if o.path != at.path and o.axis is not None and not is_dimension(o.declared)]
    equal = [o for o in same if o.expression == value and (at.axis is None or o.axis == at.axis)]
    if not equal:
        return ""
    name = getattr(at.declared, "__name__", "NAME")
    others = " and ".join(f"axis {other.axis} of `{other.path}`" for other in equal)
    return f"; if it must equal {others}, which is fixed, declare that as `{name}` too"


def holds_for(call: ExampleCall, forward: ForwardCapture) -> bool:
    """Return whether a trace of larger tensors holds for the example itself."""
    environment = forward.fakes.mode.shape_env
    assert environment is not None
    sizes: dict[Any, int] = {}
    for binding, fake in zip(forward.bindings, forward.inputs, strict=True):
        if binding.argument is None or not isinstance(fake, torch.Tensor):
            continue
        for size, example in zip(fake.shape, call.tensors[binding.argument].shape, strict=True):
            if isinstance(size, torch.SymInt) and isinstance(size.node.expr, sympy.Symbol):
                sizes[size.node.expr] = example
    return all(guard.expr.subs(sizes) in (sympy.true, True) for guard in environment.guards)


def fixed_hints(forward: ForwardCapture, call: ExampleCall) -> list[tuple[str, int, str]]:
    """Return the sizes that hints (`Dim.AUTO`) left open and a trace fixed: their place, value and user's line."""
    return [
        (str(at), int(at.expression), forward.fakes.fixed_at.get(at.size.node._expr, ""))
        for at in _places(forward, call.paths)
        if is_dimension(at.declared) and isinstance(at.size, torch.SymInt) and isinstance(at.expression, sympy.Integer)
    ]


def _guarded(forward: ForwardCapture) -> dict[Any, Any]:
    """Return the numbers that guards fix symbols to."""
    environment = forward.fakes.mode.shape_env
    assert environment is not None
    equal = [guard.expr.args for guard in environment.guards if isinstance(guard.expr, sympy.Eq)]
    return {a: b for pair in equal for a, b in (pair, pair[::-1]) if a.is_Symbol and b.is_Integer}


def _dimension(forward: ForwardCapture, symbol: Any, at: _Place, taken: Container[str]) -> Dimension:
    low, high = _range(forward, symbol)
    if at.axis is None:
        name = getattr(at.declared, "__name__", None)
        # An integer derived from a name, or equal to it, gets a name of its own.
        name = str(at) if name is None or name in taken or hasattr(at.declared, "root") else name
        fixed = at.size.node.expr
        low, high = (int(fixed), int(fixed)) if isinstance(fixed, sympy.Integer) else (low, high)
    else:
        root = getattr(at.declared, "root", at.declared)
        name = getattr(root, "__name__", None) or str(at)
        user_low = getattr(at.declared, "min", None)
        if user_low is None and forward.fakes.larger is not None:
            user_low = 0
        if low == 2 and isinstance(user_low, int) and user_low < 2:
            # The trace assumes sizes other than 0 and 1; verification runs the least size that the user declared.
            low = max(user_low, 0)
    return Dimension(symbol=symbol.name, name=name, min=low, max=high, input_index=at.position, axis=at.axis or 0)


def _range(forward: ForwardCapture, symbol: Any) -> tuple[int | None, int | None]:
    bounds = forward.fakes.mode.shape_env.var_to_range[symbol]  # type: ignore[union-attr]
    low = int(bounds.lower) if bounds.lower.is_Integer and int(bounds.lower) > -_UNBOUNDED else None
    high = int(bounds.upper) if bounds.upper.is_Integer and int(bounds.upper) < _UNBOUNDED else None
    return low, high


def _solved(forward: ForwardCapture, expression: Any, symbol: Any, at: _Place) -> Dimension:
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
        input_index=at.position,
        axis=at.axis or 0,
        factor=int(factor),
        offset=int(offset),
    )


def guards(forward: ForwardCapture, known: tuple[Dimension, ...]) -> tuple[SizeExpression, ...]:
    """Return the assumptions of the traces about the symbols beyond their ranges.

    Raises:
        ExportFailed: the format cannot express an assumption.
    """
    environment = forward.fakes.mode.shape_env
    return _encoded([guard.expr for guard in environment.guards], known)  # type: ignore[union-attr]


def assumptions(forward: ForwardCapture, known: tuple[Dimension, ...]) -> tuple[SizeExpression, ...]:
    """Return the unguarded assumptions of the traces; layouts and aliases of a functional graph rely on them.

    Raises:
        ExportFailed: the format cannot express an assumption.
    """
    return _encoded(forward.fakes.assumed, known)


def _encoded(expressions: Iterable[Any], known: tuple[Dimension, ...]) -> tuple[SizeExpression, ...]:
    symbols = {dimension.symbol for dimension in known}
    encoded: dict[SizeExpression, None] = {}
    for expression in expressions:
        if expression in (sympy.true, True) or {symbol.name for symbol in expression.free_symbols} - symbols:
            continue
        if holds_always(expression):
            continue
        record = encode_size(expression, or_none=True)
        if record is None:
            raise ExportFailed(f"the trace assumed `{expression}`, which a bundle cannot hold")
        if isinstance(record, SizeExpression):
            encoded.setdefault(record)
    return tuple(encoded)
