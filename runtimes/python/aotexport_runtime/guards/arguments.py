"""Guards of the arguments of a call: they refuse calls that no graph of the program is right for. No torch."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from aotexport_runtime.errors import NotSupported
from aotexport_runtime.guards.rule import ANY, Call, GuardSource, Row, Source, input_name, name_of
from aotexport_runtime.schema.program import ArgumentInput, InputSpec, Program, SizeInput
from aotexport_runtime.schema.sizes import Dimension, Size
from aotexport_runtime.values import sizes
from aotexport_runtime.values.subclasses import Form, is_wrapper, parts
from aotexport_runtime.values.tensors import is_integer, is_tensor

_Tensors = Sequence[tuple[int, ArgumentInput]]


def argument_rows(
    program: Program, devices: Sequence[str] = (), forms: Mapping[int, Form] = MappingProxyType({})
) -> list[Row]:
    """Return the guards of the arguments of `program`.

    `devices`: types of devices that arguments may be on, the expected one first; empty: that of capture. `forms`:
    structure per input that is a tensor subclass.
    """
    names = {dimension.symbol: dimension.name for dimension in program.dimensions}
    tensors = [(index, spec) for index, spec in enumerate(program.inputs) if isinstance(spec, ArgumentInput)]
    integers = [(index, spec) for index, spec in enumerate(program.inputs) if isinstance(spec, SizeInput)]
    found: list[Row] = []
    for index, spec in tensors:
        found += _tensor(index, spec, names, devices or (spec.meta.device,), forms.get(index))
    found += [_integer(*each) for each in integers]
    for number, dimension in enumerate(program.dimensions):
        found += _symbol(f"s{number}", dimension, program.inputs[dimension.input_index])
    found += [_truth(guard, names) for guard in program.guards]
    found += [_sizes(*each, names) for each in tensors]
    found += [_integer_value(*each) for each in integers]
    if "identity" in program.fixed:
        found += [_distinct(*each, tensors) for each in tensors]
    for each in tensors:
        found += _read_in_python(*each, program.fixed)
    return found


def _tensor(
    index: int, spec: ArgumentInput, names: Mapping[str, str], devices: Sequence[str], form: Form | None
) -> list[Row]:
    value, path, meta = input_name(index), spec.path, spec.meta
    rank = f"{value}.ndim == {len(meta.shape)}"

    def difference(leaf: Any) -> str | None:
        return _difference(leaf, spec, form, names)

    rows = [
        Row(
            "tensor",
            lambda source: ANY.is_plain(source, value),
            lambda call: f"`{path}`: expected a tensor {meta.dtype}, got {type(call.inputs[index]).__name__}",
            quick=lambda source: source.kind.is_plain(source, value),
            stricter=True,
            ends="ranks",
        ),
        Row(
            "tensor",
            lambda source: f"{source.ask(difference, value)} is None",
            lambda call: f"`{path}`: {difference(call.inputs[index])}",
            quick="True" if form is None else None,  # Tensors of torch's own class wrap nothing.
            ends="ranks",
        ),
        Row(
            "tensor",
            lambda source: source.kind.has_dtype(source, value, meta.dtype),
            lambda call: f"`{path}`: expected dtype {meta.dtype}, got {name_of(call.inputs[index].dtype)}",
        ),
        Row(
            "tensor",
            lambda source: source.kind.is_on(source, value, devices),
            lambda call: f"`{path}`: expected a tensor on {devices[0]}, got one on {call.inputs[index].device}",
        ),
        Row(
            "tensor",
            lambda source: source.kind.is_strided(source, value),
            lambda call: f"`{path}`: expected layout strided, got {name_of(call.inputs[index].layout)}",
            ends="ranks",
        ),
        Row(
            "tensor",
            rank,
            lambda call: f"`{path}`: expected shape {_shape(meta.shape, names)}, got {list(call.inputs[index].shape)}",
            quick="True" if _is_static(spec) else rank,  # Shapes of integers are compared whole.
            ends="ranks",
        ),
    ]
    return [row._replace(subject=value) for row in rows]


def _integer(index: int, spec: SizeInput) -> Row:
    return Row(
        "tensor",
        lambda source: source.ask(is_integer, input_name(index)),
        lambda call: f"`{spec.path}`: expected an int, got {type(call.inputs[index]).__name__}",
        quick=f"type({input_name(index)}) is int",
        ends="ranks",
        subject=input_name(index),
    )


def _symbol(name: str, dimension: Dimension, holder: InputSpec) -> list[Row]:
    """Return the rows about the symbol with variable `name`, whose value an input has."""
    value, low, high = input_name(dimension.input_index), dimension.min, dimension.max
    axis, factor, offset = dimension.axis, int(dimension.factor), int(dimension.offset)
    is_whole = (factor, offset) == (1, 0)
    if isinstance(holder, SizeInput):
        read, where = value, f"`{holder.path}`"
    else:
        read = f"{value}.shape[{int(axis)}]"
        where = f"`{holder.path if isinstance(holder, ArgumentInput) else holder.name}`: size {axis}"

    def taken(source: GuardSource) -> list[str]:
        source.symbols[dimension.symbol] = name
        return [f"symbols[{source.constant(dimension.symbol)}] = {name}"] if source.explains else []

    def multiple(call: Call) -> str:
        held = call.inputs[dimension.input_index]
        size = held if isinstance(holder, SizeInput) else held.shape[axis]
        return f"{where} is {size}; expected {factor} * {dimension.name} + {offset}"

    bounds = [] if low is None else [f"{name} >= {int(low)}"]
    bounds += [] if high is None else [f"{name} <= {int(high)}"]
    rows = [
        Row(
            "sizes",
            lambda source: f"not {source.ask(is_tensor, name)}",
            "torch.jit.trace would hold the sizes of this call for the only ones, and the program has dynamic ones. "
            "Save the bundle itself, or export with fixed sizes",
            quick=f"type({name}) is int",
            prepare=lambda source: [f"{name} = {read}"],
            ends="symbols",
            error=NotSupported,
        ),
        Row(
            "sizes",
            "True" if factor == 1 else "not rest",
            multiple,
            prepare=lambda source: [] if is_whole else [f"{name}, rest = divmod({name} - ({offset}), {factor})"],
            ends="symbols",
        ),
        Row(
            "sizes",
            " and ".join(bounds) or "True",
            lambda call: (
                f"{where}: `{dimension.name}` is {call.symbols[dimension.symbol]}, outside "
                f"{sizes.describe_range(low, high)}"
            ),
            prepare=taken,
        ),
    ]
    return [row._replace(subject=name, needs="ranks") for row in rows]


def _truth(guard: Size, names: Mapping[str, str]) -> Row:
    def message(call: Call) -> str:
        here = ", ".join(f"{names[symbol]}={call.symbols[symbol]}" for symbol in sorted(sizes.symbols_of(guard)))
        return f"the program holds only where {sizes.describe(guard, names)}; here {here}"

    return Row("sizes", lambda source: source.condition(guard), message, needs="symbols")


def _sizes(index: int, spec: ArgumentInput, names: Mapping[str, str]) -> Row:
    shape = spec.meta.shape

    def message(call: Call) -> str:
        got = call.inputs[index].shape
        wanted = [value_of(size, call.symbols) for size in shape]
        axis = next(axis for axis, size in enumerate(wanted) if got[axis] != size)
        size = shape[axis]
        name = "" if isinstance(size, int) else f" ({sizes.describe(size, names)} = {wanted[axis]})"
        words = f"`{spec.path}`: expected shape {_shape(shape, names)}, got {list(got)} at axis {axis}{name}"
        if not _is_static(spec):
            return words
        option = f"--dynamic {json.dumps(f'{spec.path}:{axis}=NAME')}"
        return f"{words}; its sizes are fixed as in the example, an export with {option} lets this one vary"

    value = input_name(index)
    return Row("sizes", lambda source: f"{value}.shape == {source.shape(shape)}", message, needs="symbols")


def _integer_value(index: int, spec: SizeInput) -> Row:
    return Row(
        "sizes",
        lambda source: f"{input_name(index)} == {source.size(spec.symbol)}",
        lambda call: f"`{spec.path}`: expected {call.symbols[spec.symbol]}, got {call.inputs[index]}",
        needs="symbols",
    )


def _distinct(index: int, spec: ArgumentInput, tensors: _Tensors) -> Row:
    def message(call: Call) -> str:
        path = next(other.path for place, other in tensors if call.inputs[place] is call.inputs[index])
        return (
            f"`{spec.path}`: expected another tensor than `{path}`, as at capture, since the model takes "
            "gradients with regard to its arguments, or asks whether they are one object; got the same"
        )

    before = [f"{input_name(index)} is not {input_name(other)}" for other, _ in tensors if other < index]
    return Row("tensor", " and ".join(before) or "True", message, needs="symbols")


def _read_in_python(index: int, spec: ArgumentInput, fixed: Sequence[str]) -> list[Row]:
    """Return the rows about attributes of a tensor that the model's code reads."""
    value, path, meta = input_name(index), spec.path, spec.meta
    requires_grad, is_leaf = f"{value}.requires_grad is {meta.requires_grad}", f"{value}.is_leaf is {spec.is_leaf}"
    if "requires_grad" in fixed:
        # One violation says it: a tensor that requires no grad is a leaf.
        is_leaf += f" or not ({requires_grad})"

    def laid_out(source: GuardSource) -> str:
        same = source.ask(same_layout, f"{value}.shape", f"{value}.stride()", source.shape(meta.stride))
        return f"{same} and {value}.storage_offset() == {source.size(meta.offset)}"

    def other_layout(call: Call) -> str:
        leaf, stride = call.inputs[index], tuple(value_of(step, call.symbols) for step in meta.stride)
        return (
            f"`{path}`: expected strides {stride} and storage offset {value_of(meta.offset, call.symbols)}, as at "
            f"capture, since the model's code reads the layout of tensors; got {leaf.stride()} and "
            f"{leaf.storage_offset()}"
        )

    def attribute(name: str, expected: bool, holds: str) -> Row:
        words = f"`{path}`: expected {name}={expected}, as at capture, since the model's code reads it; got"
        quick = _of_torch(holds)
        return Row("tensor", holds, lambda call: f"{words} {getattr(call.inputs[index], name)}", quick, needs="symbols")

    rows = {
        "layout": Row("sizes", laid_out, other_layout, _of_torch(laid_out), needs="symbols"),
        "requires_grad": attribute("requires_grad", meta.requires_grad, requires_grad),
        "is_leaf": attribute("is_leaf", spec.is_leaf, is_leaf),
    }
    return [row for name, row in rows.items() if name in fixed]


def _of_torch(holds: Source) -> Source:
    """Return the quick form of a predicate about attributes of torch's tensors; other kinds have none."""
    return lambda source: "" if not source.kind.has_autograd else holds(source) if callable(holds) else holds


def _shape(shape: Sequence[Size], names: Mapping[str, str]) -> str:
    """Return a shape for people."""
    return "[" + ", ".join(sizes.describe(size, names) for size in shape) + "]"


def _is_static(spec: ArgumentInput) -> bool:
    return all(isinstance(size, int) for size in spec.meta.shape)


def _difference(leaf: Any, spec: ArgumentInput, form: Form | None, names: Mapping[str, str]) -> str | None:
    """Return how a tensor differs in its structure; None: it does not."""
    if form is None:
        got = type(leaf).__name__
        return f"expected a plain tensor, as at capture, got a `{got}`" if is_wrapper(leaf) else None
    reason = form.why_not(leaf)
    if reason is not None:
        return reason
    for part, meta in zip(parts(leaf), spec.parts, strict=True):
        sized = zip(part.shape, meta.shape, strict=False)
        fits = name_of(part.dtype) == meta.dtype and part.dim() == len(meta.shape)
        if not fits or any(isinstance(size, int) and n != size for n, size in sized):
            got = f"{name_of(part.dtype)}{list(part.shape)}"
            return f"expected to be made of {meta.dtype}{_shape(meta.shape, names)}, got {got}"
    return None


def value_of(size: Size, symbols: Mapping[str, int]) -> int | None:
    """Return the value of `size`; None: it has none for these symbols (it divides by zero)."""
    try:
        return sizes.evaluate(size, symbols)
    except sizes.UNDEFINED:
        return None


def same_layout(shape: Sequence[int], actual: Sequence[int], expected: Sequence[int | None]) -> bool:
    """Return whether two strides address the same elements: they may differ along axes of at most one element."""
    if len(shape) != len(expected):
        return False
    return 0 in shape or all(size <= 1 or a == b for size, a, b in zip(shape, actual, expected, strict=True))
