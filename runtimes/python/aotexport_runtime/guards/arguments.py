"""Guards of the arguments of a call: they refuse calls that no graph of the program is right for. No torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from aotexport_runtime.errors import NotSupported
from aotexport_runtime.guards.rule import Call, GuardRule, GuardSource, GuardTable, input_name, rows
from aotexport_runtime.guards.subjects import (
    Argument,
    ArgumentFacts,
    Symbol,
    arguments,
    integer_arguments,
    name_of,
    same_layout,
    symbols,
    value_of,
)
from aotexport_runtime.schema.program import Program
from aotexport_runtime.values import sizes
from aotexport_runtime.values.tensors import is_integer, is_tensor


def _read_in_python(facts: ArgumentFacts) -> list[Argument]:
    return arguments(facts) if {"layout", "requires_grad", "is_leaf"} & set(facts.program.fixed) else []


def _distinct(_: GuardSource, argument: Argument) -> str:
    before = [other for other in arguments(argument.facts) if other.index < argument.index]
    return " and ".join(f"{argument.variable} is not {other.variable}" for other in before) or "True"


def _the_same(argument: Argument, call: Call) -> str:
    leaf = call.inputs[argument.index]
    path = next(other.spec.path for other in arguments(argument.facts) if call.inputs[other.index] is leaf)
    return (
        f"`{argument.spec.path}`: expected another tensor than `{path}`, as at capture, since the model takes "
        "gradients with regard to its arguments, or asks whether they are one object; got the same"
    )


def _laid_out(source: GuardSource, argument: Argument) -> str:
    if "layout" not in argument.facts.program.fixed:
        return "True"
    value, meta = argument.variable, argument.spec.meta
    same = source.ask(same_layout, f"{value}.shape", f"{value}.stride()", source.shape(meta.stride))
    return f"{same} and {value}.storage_offset() == {source.size(meta.offset)}"


def _other_layout(argument: Argument, call: Call) -> str:
    leaf, meta = call.inputs[argument.index], argument.spec.meta
    stride, offset = tuple(value_of(step, call.symbols) for step in meta.stride), value_of(meta.offset, call.symbols)
    return (
        f"`{argument.spec.path}`: expected strides {stride} and storage offset {offset}, as at capture, since the "
        f"model's code reads the layout of tensors; got {leaf.stride()} and {leaf.storage_offset()}"
    )


def _requires_grad(_: GuardSource, argument: Argument) -> str:
    fixed = "requires_grad" in argument.facts.program.fixed
    return f"{argument.variable}.requires_grad is {argument.spec.meta.requires_grad}" if fixed else "True"


def _is_leaf(_: GuardSource, argument: Argument) -> str:
    fixed = "is_leaf" in argument.facts.program.fixed
    return f"{argument.variable}.is_leaf is {argument.spec.is_leaf}" if fixed else "True"


def _autograd_only(holds: Callable[[GuardSource, Argument], str]) -> Callable[[GuardSource, Argument], str | None]:
    """Return the quick form of a predicate about tensors of torch; other kinds have none."""

    def quick(source: GuardSource, argument: Argument) -> str | None:
        predicate = holds(source, argument)
        return predicate if source.kind.has_autograd or predicate == "True" else None

    return quick


def _read(source: GuardSource, symbol: Symbol) -> list[str]:
    value = input_name(symbol.record.input_index)
    return [f"{symbol.name} = {value if symbol.is_argument else f'{value}.shape[{int(symbol.record.axis)}]'}"]


def _divide(source: GuardSource, symbol: Symbol) -> list[str]:
    factor, offset = int(symbol.record.factor), int(symbol.record.offset)
    if (factor, offset) == (1, 0):
        return []
    return [f"{symbol.name}, rest = divmod({symbol.name} - ({offset}), {factor})"]


def _take(source: GuardSource, symbol: Symbol) -> list[str]:
    source.symbols[symbol.record.symbol] = symbol.name
    return [f"symbols[{source.constant(symbol.record.symbol)}] = {symbol.name}"] if source.explains else []


def _in_range(_: GuardSource, symbol: Symbol) -> str:
    low, high = symbol.record.min, symbol.record.max
    above = [] if low is None else [f"{symbol.name} >= {int(low)}"]
    below = [] if high is None else [f"{symbol.name} <= {int(high)}"]
    return " and ".join(above + below) or "True"


ARGUMENTS: tuple[GuardRule[ArgumentFacts, Any], ...] = (
    GuardRule(
        name="tensor",
        cost="tensor",
        of=arguments,
        holds=lambda source, a: source.ask(is_tensor, a.variable),
        quick=lambda source, a: source.kind.is_plain(source.constant, a.variable),
        stricter=True,
        ends=("subject", "ranks", "symbols"),
        message=lambda a, call: (
            f"`{a.spec.path}`: expected a tensor {a.spec.meta.dtype}, got {type(call.inputs[a.index]).__name__}"
        ),
    ),
    GuardRule(
        name="structure",
        cost="tensor",
        of=arguments,
        holds=lambda source, a: f"{source.ask(a.difference, a.variable)} is None",
        # Tensors of torch's own class wrap nothing.
        quick=lambda source, a: "True" if a.form is None else None,
        ends=("subject", "ranks", "symbols"),
        message=lambda a, call: f"`{a.spec.path}`: {a.difference(call.inputs[a.index])}",
    ),
    GuardRule(
        name="dtype",
        cost="tensor",
        of=arguments,
        holds=lambda source, a: f"{source.ask(name_of, f'{a.variable}.dtype')} == {source.constant(a.spec.meta.dtype)}",
        quick=lambda source, a: source.kind.has_dtype(source.constant, a.variable, a.spec.meta.dtype),
        message=lambda a, call: (
            f"`{a.spec.path}`: expected dtype {a.spec.meta.dtype}, got {name_of(call.inputs[a.index].dtype)}"
        ),
    ),
    GuardRule(
        name="device",
        cost="tensor",
        of=arguments,
        holds=lambda source, a: f"{a.variable}.device.type in {source.constant(a.device_types)}",
        quick=lambda source, a: source.kind.is_on(source.constant, a.variable, a.device_types),
        message=lambda a, call: (
            f"`{a.spec.path}`: expected a tensor on {a.device_types[0]}, got one on {call.inputs[a.index].device}"
        ),
    ),
    GuardRule(
        name="layout",
        cost="tensor",
        of=arguments,
        holds=lambda source, a: f"{source.ask(name_of, f'{a.variable}.layout')} == 'strided'",
        quick=lambda source, a: source.kind.is_strided(source.constant, a.variable),
        ends=("subject", "ranks", "symbols"),
        message=lambda a, call: f"`{a.spec.path}`: expected layout strided, got {name_of(call.inputs[a.index].layout)}",
    ),
    GuardRule(
        name="rank",
        cost="tensor",
        of=arguments,
        holds=lambda source, a: f"{a.variable}.ndim == {len(a.spec.meta.shape)}",
        # Shapes of integers are compared whole.
        quick=lambda source, a: "True" if a.is_static else f"{a.variable}.ndim == {len(a.spec.meta.shape)}",
        ends=("ranks", "symbols"),
        message=lambda a, call: (
            f"`{a.spec.path}`: expected shape {a.expected_shape}, got {list(call.inputs[a.index].shape)}"
        ),
    ),
    GuardRule(
        name="integer",
        cost="tensor",
        of=integer_arguments,
        holds=lambda source, size: f"{source.ask(is_integer, input_name(size.index))}",
        quick=lambda source, size: f"type({input_name(size.index)}) is int",
        ends=("ranks", "symbols"),
        message=lambda size, call: f"`{size.spec.path}`: expected an int, got {type(call.inputs[size.index]).__name__}",
    ),
    GuardRule(
        name="traced size",
        cost="sizes",
        of=symbols,
        prepare=_read,
        holds=lambda source, symbol: f"not {source.ask(is_tensor, symbol.name)}",
        quick=lambda source, symbol: f"type({symbol.name}) is int",
        needs=("ranks",),
        ends=("subject", "symbols"),
        error=NotSupported,
        message=lambda symbol, call: (
            "torch.jit.trace would hold the sizes of this call for the only ones, and the program has dynamic "
            "ones. Save the bundle itself, or export with fixed sizes"
        ),
    ),
    GuardRule(
        name="factor",
        cost="sizes",
        of=symbols,
        prepare=_divide,
        holds=lambda source, symbol: "True" if symbol.record.factor == 1 else "not rest",
        needs=("ranks",),
        ends=("subject", "symbols"),
        message=lambda symbol, call: (
            f"{symbol.where} is {symbol.size(call)}; expected {symbol.record.factor} * {symbol.record.name} + "
            f"{symbol.record.offset}"
        ),
    ),
    GuardRule(
        name="range",
        cost="sizes",
        of=symbols,
        prepare=_take,
        holds=_in_range,
        needs=("ranks",),
        message=lambda symbol, call: (
            f"{symbol.where}: `{symbol.record.name}` is {call.symbols[symbol.record.symbol]}, outside "
            f"{sizes.describe_range(symbol.record.min, symbol.record.max)}"
        ),
    ),
    GuardRule(
        name="guard",
        cost="sizes",
        of=lambda facts: [(guard, facts.names) for guard in facts.program.guards],
        holds=lambda source, subject: source.condition(subject[0]),
        needs=("symbols",),
        message=lambda subject, call: (
            f"the program holds only where {sizes.describe(*subject)}; here "
            + ", ".join(f"{subject[1][s]}={call.symbols[s]}" for s in sorted(sizes.symbols_of(subject[0])))
        ),
    ),
    GuardRule(
        name="sizes",
        cost="sizes",
        of=arguments,
        holds=lambda source, a: f"{a.variable}.shape == {source.shape(a.spec.meta.shape)}",
        needs=("symbols",),
        message=lambda a, call: f"`{a.spec.path}`: expected shape {a.expected_shape}, {a.unequal_axis(call)}",
    ),
    GuardRule(
        name="integer's value",
        cost="sizes",
        of=integer_arguments,
        holds=lambda source, size: f"{input_name(size.index)} == {source.size(size.spec.symbol)}",
        needs=("symbols",),
        message=lambda size, call: (
            f"`{size.spec.path}`: expected {call.symbols[size.spec.symbol]}, got {call.inputs[size.index]}"
        ),
    ),
    GuardRule(
        name="identity",
        cost="tensor",
        of=lambda facts: arguments(facts) if "identity" in facts.program.fixed else [],
        holds=_distinct,
        needs=("symbols",),
        message=_the_same,
    ),
    GuardRule(
        name="fixed layout",
        cost="sizes",
        of=_read_in_python,
        holds=_laid_out,
        quick=_autograd_only(_laid_out),
        needs=("symbols",),
        message=_other_layout,
    ),
    GuardRule(
        name="fixed requires_grad",
        cost="tensor",
        of=_read_in_python,
        holds=_requires_grad,
        quick=_autograd_only(_requires_grad),
        needs=("symbols",),
        message=lambda a, call: (
            f"`{a.spec.path}`: expected requires_grad={a.spec.meta.requires_grad}, as at capture, since the model's "
            f"code reads it; got {call.inputs[a.index].requires_grad}"
        ),
        ends=("subject",),
    ),
    GuardRule(
        name="fixed is_leaf",
        cost="tensor",
        of=_read_in_python,
        holds=_is_leaf,
        quick=_autograd_only(_is_leaf),
        needs=("symbols",),
        message=lambda a, call: (
            f"`{a.spec.path}`: expected is_leaf={a.spec.is_leaf}, as at capture, since the model's code reads it; got "
            f"{call.inputs[a.index].is_leaf}"
        ),
    ),
)
"""Guards of a program's arguments."""


def argument_guards(program: Program, *device_types: str) -> GuardTable:
    """Return the guards of the arguments of `program`; for `device_types` see `ArgumentFacts`."""
    return GuardTable([rows(ARGUMENTS, ArgumentFacts(program=program, device_types=device_types))], len(program.inputs))
