"""The fast way through a call: a generated function that serves the calls that a program gets most often.

It checks in straight-line code what the signature and the guards check, and turns away whatever they would have to look
at twice; then they decide, and find the words for a refusal. Invariant: what it serves, they admit as well, with the
same inputs and symbols, and the functional graph, where there is one, serves it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from aotexport_runtime.call.autograd import apply_joint
from aotexport_runtime.call.guards import SoftGuards
from aotexport_runtime.call.joint import JointProgram
from aotexport_runtime.call.signature import Signature
from aotexport_runtime.call.straight_line import Call, Writer, input_name, serves
from aotexport_runtime.engines import transforms
from aotexport_runtime.engines.autocast import device_type_of
from aotexport_runtime.schema.manifest import StateTensor
from aotexport_runtime.schema.program import ArgumentInput, InputSpec, Program, StateInput
from aotexport_runtime.submodules.places import StateSlot
from aotexport_runtime.values import dtypes

Ties = Sequence[tuple[StateSlot, Sequence[StateSlot], StateTensor]]
"""Per tied tensor: where it is kept, where its other names are, its record."""


@dataclass(frozen=True, kw_only=True)
class Served:
    """Which calls a functional graph serves.

    Attributes:
        soft: its guards.
        joint: a joint graph without epilogues: what it returns is what the program returns; None: it is no such.
    """

    soft: SoftGuards
    joint: JointProgram | None


@dataclass(frozen=True, kw_only=True)
class Way:
    """What the fast way passes, and where it leads.

    Attributes:
        program: its record.
        signature: binds calls.
        state: index of each input that is state, and where it is kept.
        ties: see `Ties`.
        device: where the bundle was loaded to; None: where it was captured.
        functional: calls that its functional graph serves; None: the forward graph serves every call.
        serve: runs the program on inputs and symbols that were checked; returns what the call returns.
        unflatten: puts the program's outputs into the structure that the call returns.
        otherwise: takes the calls that are turned away.
    """

    program: Program
    signature: Signature
    state: Sequence[tuple[int, dict[str, Any], str]]
    ties: Ties
    device: torch.device | None
    functional: Served | None
    serve: Callable[[list[Any], dict[str, int]], Any]
    unflatten: Callable[[Any], Any]
    otherwise: Call


def fast_way(way: Way) -> Call:
    """Return what takes every call of a program: the fast way, or the other where the program has none."""
    program, leaves = way.program, way.signature.plain_leaves
    if leaves is None or not serves(program, leaves) or any(map(_is_wrapped, program.inputs)):
        return way.otherwise
    if program.autocast is not None and "autocast" in program.fixed:
        return way.otherwise
    writer = Writer()
    writer.bind(leaves)
    for index in leaves:
        _check_argument(writer, way, index)
    _take_state(writer, way)
    writer.check_sizes(program, leaves)
    device_type = device_type_of(program, way.device)
    autocasts = way.functional is not None or "autocast" in program.fixed
    if autocasts and torch.amp.is_autocast_available(device_type):
        writer.refuse_if(f"{writer.constant(torch.is_autocast_enabled)}({writer.constant(device_type)})")
    if way.functional is not None:
        _check_functional(writer, program, way.functional)
    writer.guarded()
    _serve(writer, way)
    return writer.function(way.otherwise, f"{program.name} call")


def _is_wrapped(spec: InputSpec) -> bool:
    return isinstance(spec, StateInput) and spec.subclass is not None


def _check_argument(writer: Writer, way: Way, index: int) -> None:
    """Check what every call's tensor must be, whatever its sizes are."""
    spec, value = way.program.inputs[index], input_name(index)
    assert isinstance(spec, ArgumentInput)
    tensor, parameter = writer.constant(torch.Tensor), writer.constant(torch.nn.Parameter)
    writer.refuse_if(f"type({value}) is not {tensor} and type({value}) is not {parameter}")
    writer.refuse_if(f"{value}.dtype is not {writer.constant(dtypes.dtype(spec.meta.dtype))}")
    writer.refuse_if(f"{value}.layout is not {writer.constant(torch.strided)}")
    device_type = spec.meta.device if way.device is None else way.device.type
    if device_type in ("cpu", "cuda"):
        # Several times as fast as reading the device.
        writer.refuse_if(f"not {value}.is_{device_type}")
    else:
        writer.refuse_if(f"{value}.device.type != {writer.constant(device_type)}")
    if any(not isinstance(size, int) for size in spec.meta.shape):
        writer.refuse_if(f"{value}.dim() != {len(spec.meta.shape)}")


def _take_state(writer: Writer, way: Way) -> None:
    taken: dict[tuple[int, str], str] = {}
    for index, table, key in way.state:
        value = taken[id(table), key] = input_name(index)
        writer.lines.append(f"{value} = {writer.constant(table)}.get({writer.constant(key)})")
        writer.refuse_if(f"{value} is None")
    for (table, key), others, _ in way.ties:
        value = taken.get((id(table), key), f"{writer.constant(table)}.get({writer.constant(key)})")
        for other, name in others:
            writer.refuse_if(f"{writer.constant(other)}.get({writer.constant(name)}) is not {value}")


def _check_functional(writer: Writer, program: Program, served: Served) -> None:
    """Check that the functional graph serves the call; see `SoftGuards`."""
    soft = served.soft
    writer.refuse_if(f"{writer.constant(transforms.active)}()")
    for symbol in soft.sizes:
        writer.refuse_if(f"{writer.symbols[symbol]} == 0")
    for guard in soft.guards:
        writer.refuse_if(f"not {writer.size(guard)}")
    for index, stride, _ in soft.strides:
        writer.refuse_if(f"{input_name(index)}.stride() != {writer.shape(stride)}")
    for index in soft.lazy:
        spec = program.inputs[index]
        assert isinstance(spec, ArgumentInput)
        is_complex = spec.meta.dtype.startswith("complex")
        writer.refuse_if(f"{input_name(index)}.is_neg()" + (f" or {input_name(index)}.is_conj()" if is_complex else ""))
    asked = soft.with_grad if soft.records_gradients else [index for index, _, _ in soft.strides]
    wants = " or ".join(f"{input_name(index)}.requires_grad" for index in asked) or "False"
    enabled = f"{writer.constant(torch.is_grad_enabled)}()"
    if soft.records_gradients:
        writer.refuse_if(f"not {enabled} or not ({wants})")
        for index in soft.without_grad:
            writer.refuse_if(f"{input_name(index)}.requires_grad")
        for index in soft.without_hooks:
            writer.refuse_if(f"{input_name(index)}._backward_hooks")
        for index, is_leaf in soft.leaf_mutations:
            writer.refuse_if(f"{input_name(index)}.is_leaf is not {is_leaf}")
    else:
        writer.refuse_if(f"{enabled} and ({wants})")
    for index, offset in soft.offsets:
        writer.refuse_if(f"{input_name(index)}.storage_offset() != {writer.size(offset)}")
    if soft.needs_alias_check:
        shares, inputs = (
            writer.constant(soft.mutation_is_shared),
            ", ".join(map(input_name, range(len(program.inputs)))),
        )
        writer.refuse_if(f"{shares}([{inputs}])")


def _serve(writer: Writer, way: Way) -> None:
    """Run the program on the inputs."""
    inputs = ", ".join(map(input_name, range(len(way.program.inputs))))
    symbols = ", ".join(f"{writer.constant(symbol)}: {source}" for symbol, source in writer.symbols.items())
    joint = None if way.functional is None else way.functional.joint
    if joint is None:
        writer.lines.append(f"return {writer.constant(way.serve)}([{inputs}], {{{symbols}}})")
        return
    for index in joint.plain:
        writer.refuse_if(f"{writer.constant(transforms.may_be_dead)}({input_name(index)})")
    applied = f"{writer.constant(apply_joint)}({writer.constant(joint)}, {{{symbols}}}, {inputs})"
    writer.lines.append(f"return {writer.constant(way.unflatten)}({applied})")
