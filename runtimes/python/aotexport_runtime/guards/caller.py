"""Guards of a program's caller: modes of the process, and the module's tensors that the program reads."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from aotexport_runtime.errors import NotSupported
from aotexport_runtime.execution.autocast import autocast_dtype, device_type_of
from aotexport_runtime.guards.rule import Call, GuardRule, GuardSource, input_name
from aotexport_runtime.schema.manifest import StateTensor
from aotexport_runtime.schema.program import Program, Question, SizeInput, StateInput
from aotexport_runtime.schema.trees import Leaf
from aotexport_runtime.submodules.places import StateSlot
from aotexport_runtime.submodules.tables import is_sharded
from aotexport_runtime.values.subclasses import Form, is_wrapper
from aotexport_runtime.values.trees import leaves

Ties = Sequence[tuple[StateSlot, Sequence[StateSlot], StateTensor]]
"""Per tied tensor: its slot, the slots of its other names, its record."""


@dataclass(frozen=True, kw_only=True)
class Caller:
    """Facts for guards of the caller.

    Attributes:
        program: its record.
        device_type: type of the devices that it runs on.
        state: index and slot of each input that is state.
        ties: see `Ties`.
        forms: structure per input that is state and a tensor subclass.
        added: modules that the program calls and that were not captured.
    """

    program: Program
    device_type: str
    state: Sequence[tuple[int, dict[str, Any], str]]
    ties: Ties
    forms: Mapping[int, Form]
    added: Sequence[nn.Module] = ()


@dataclass(frozen=True)
class ModuleTensor:
    """A tensor of the module that the program reads."""

    index: int
    table: dict[str, Any]
    key: str
    name: str
    is_passed: bool
    program: str


@dataclass(frozen=True)
class Differentiated:
    """An input with regard to which the model takes gradients."""

    index: int
    name: str
    requires_grad: bool


def has_hooks(tensor: torch.Tensor) -> bool:
    """Return whether `tensor` has hooks or retains its gradient."""
    return tensor.retains_grad or bool(tensor._backward_hooks)


def _state(caller: Caller) -> list[ModuleTensor]:
    trees = [parameter.tree for parameter in caller.program.parameters]
    passed = {leaf.index for tree in trees for _, leaf in leaves(tree) if isinstance(leaf, Leaf)}
    return [
        ModuleTensor(index, table, key, _name(caller.program, index), index in passed, caller.program.name)
        for index, table, key in caller.state
    ]


def _differentiated(caller: Caller) -> list[Differentiated]:
    found: list[Differentiated] = []
    for index in caller.program.differentiated:
        spec = caller.program.inputs[index]
        assert not isinstance(spec, SizeInput)
        found.append(Differentiated(index, _name(caller.program, index), spec.meta.requires_grad))
    return found


def _questions(caller: Caller) -> list[tuple[Question, list[str]]]:
    return [(q, [_name(caller.program, index) for index in q.inputs]) for q in caller.program.questions]


def _added(caller: Caller) -> list[Callable[[], bool]]:
    """Return whether a module that was not captured requires grad, if parts of the program did not at capture."""
    if not caller.added or all(question.requires_grad for question in caller.program.questions):
        return []
    return [lambda: any(each.requires_grad for module in caller.added for each in module.parameters())]


def _is_answered(source: GuardSource, asked: tuple[Question, list[str]]) -> str:
    question, _ = asked
    requires_grad = " or ".join(f"{input_name(index)}.requires_grad" for index in question.inputs)
    same = f"({requires_grad or 'False'}) is {question.requires_grad}"
    return f"{same} or not {source.ask(records_gradients)}" if question.recording else same


def _other_answer(asked: tuple[Question, list[str]], call: Call) -> str:
    question, names = asked
    listed = " and ".join([*filter(None, [", ".join(f"`{name}`" for name in names[:-1])]), f"`{names[-1]}`"])
    which = "" if len(names) == 1 else " of one of them" if question.requires_grad else " of each"
    reader = "gradients of the model depend on it" if question.recording else "the model's code reads it"
    return (
        f"{listed}: expected requires_grad={question.requires_grad}{which}, as at capture, since {reader}; got "
        f"{not question.requires_grad}. Set it so, or export the model with it as it is now"
    )


def _name(program: Program, index: int) -> str:
    spec = program.inputs[index]
    return spec.name if isinstance(spec, StateInput) else spec.path


def _fixing(mode: str) -> Any:
    return lambda caller: [caller] if mode in caller.program.fixed else []


def _no_autocast(source: GuardSource, caller: Caller) -> str:
    if caller.program.autocast is not None:
        return _same_autocast(source, caller)
    return without_autocast(source, caller.device_type)


def _same_autocast(source: GuardSource, caller: Caller) -> str:
    if caller.program.autocast is not None and caller.device_type != device_type_of(caller.program, None):
        return "False"
    asked = source.ask(autocast_dtype, source.constant(caller.device_type))
    return f"{asked} == {source.constant(caller.program.autocast)}"


def without_autocast(source: GuardSource, device_type: str) -> str:
    """Return source that asks quickly whether autocast is off for a type of devices."""
    if not torch.amp.is_autocast_available(device_type):
        return "True"
    return f"not {source.ask(torch.is_autocast_enabled, source.constant(device_type))}"


def _other_autocast(caller: Caller, call: Call) -> str:
    now, then = autocast_dtype(caller.device_type), caller.program.autocast
    here, there = caller.device_type, device_type_of(caller.program, None)
    reason = "as at capture, since what the model's code does depends on dtypes"
    if then is not None and here != there:
        return (
            f"autocast: expected {then} on {there} around the call, {reason}; got {now or 'none'} on {here}, where "
            "autocast casts for other operators. Export the model on that device"
        )
    return (
        f"autocast: expected {then or 'none'} around the call, {reason}; got {now or 'none'}. Export the model outside "
        f"of autocast and with `--autocast {now or then}`, for both, or with its region inside of the model"
    )


def _take(source: GuardSource, state: ModuleTensor) -> list[str]:
    value = input_name(state.index)
    lines = [f"p{state.index} = {value}"] if state.is_passed else []
    lines.append(f"{value} = {source.constant(state.table)}.get({source.constant(state.key)})")
    return [*lines, f"inputs[{state.index}] = {value}"] if source.explains else lines


def _is_tied(source: GuardSource, tie: tuple[StateSlot, Sequence[StateSlot], StateTensor]) -> str:
    (table, key), others, _ = tie
    value = f"{source.constant(table)}.get({source.constant(key)})"
    same = (f"{source.constant(other)}.get({source.constant(name)}) is {value}" for other, name in others)
    return " and ".join(same)


def records_gradients() -> bool:
    """Return the grad mode of the caller; an export of a loaded bundle answers for the call that it captures."""
    return torch.is_grad_enabled()


MODES: tuple[GuardRule[Caller, Any], ...] = (
    GuardRule(
        name="grad mode",
        cost="mode",
        of=_fixing("grad_mode"),
        holds=lambda source, caller: f"{source.ask(records_gradients)} is {caller.program.grad}",
        message=lambda caller, call: (
            f"gradients: expected torch.is_grad_enabled() to be {caller.program.grad}, as at capture, since the "
            f"model's code reads it; got {not caller.program.grad}"
        ),
    ),
    GuardRule(
        name="inference mode",
        cost="mode",
        of=_fixing("inference_mode"),
        holds=lambda source, caller: f"not {source.ask(torch.is_inference_mode_enabled)}",
        message=lambda caller, call: (
            "gradients: torch.inference_mode() records nothing for the gradients that the model itself takes, or the "
            "model's code asks whether it is on; use torch.no_grad()"
        ),
    ),
    GuardRule(
        name="autocast",
        cost="mode",
        of=_fixing("autocast"),
        holds=_same_autocast,
        quick=_no_autocast,
        message=_other_autocast,
    ),
)
"""Modes of the process that the model's code read."""

STATE: tuple[GuardRule[Caller, Any], ...] = (
    GuardRule(
        name="present",
        cost="tensor",
        of=_state,
        prepare=_take,
        holds=lambda source, state: f"{input_name(state.index)} is not None",
        error=NotSupported,
        message=lambda state, call: (
            f"the module's `{state.name}` is gone or was replaced by something that is computed "
            "(pruning, parametrization), and the programs read it. Change the model, and export it again"
        ),
    ),
    GuardRule(
        name="whole",
        cost="tensor",
        of=lambda caller: [s for s in _state(caller) if is_sharded(s.table) and s.index not in caller.forms],
        holds=lambda source, state: f"not {source.ask(is_wrapper, input_name(state.index))}",
        error=NotSupported,
        message=lambda state, call: (
            f"`{state.name}` is in parts over processes here, and program `{state.program}` reads it whole: "
            "`fully_shard` gathers it for calls of the module that it was given. Give it the loaded module too, and "
            "call that (methods after `register_fsdp_forward_method`)"
        ),
    ),
    GuardRule(
        name="structure of state",
        cost="tensor",
        of=lambda caller: [(s, caller.forms[s.index]) for s in _state(caller) if s.index in caller.forms],
        holds=lambda source, pair: f"{source.ask(pair[1].why_not, input_name(pair[0].index))} is None",
        quick=lambda source, pair: None,
        error=NotSupported,
        message=lambda pair, call: f"the module's `{pair[0].name}`: {pair[1].why_not(call.inputs[pair[0].index])}",
    ),
    GuardRule(
        name="the module's own",
        cost="tensor",
        of=lambda caller: [state for state in _state(caller) if state.is_passed],
        holds=lambda source, state: f"p{state.index} is None or p{state.index} is {input_name(state.index)}",
        message=lambda state, call: f"an argument that was the module's own `{state.name}` at capture must be it again",
    ),
    GuardRule(
        name="hooks",
        cost="tensor",
        of=_differentiated,
        holds=lambda source, each: f"not {source.ask(has_hooks, input_name(each.index))}",
        message=lambda each, call: (
            f"`{each.name}`: expected neither hooks nor a retained gradient: the model takes gradients with regard "
            "to it, and eager would call them in the call, which a graph does not; pass a view of it, which "
            "has none"
        ),
    ),
    GuardRule(
        name="differentiated",
        cost="tensor",
        of=_differentiated,
        holds=lambda source, each: f"{input_name(each.index)}.requires_grad" if each.requires_grad else "True",
        message=lambda each, call: (
            f"`{each.name}`: expected requires_grad=True, as at capture, since the model takes gradients with "
            "regard to it; got False"
        ),
    ),
    GuardRule(
        name="questions",
        cost="tensor",
        of=_questions,
        holds=_is_answered,
        message=_other_answer,
    ),
    GuardRule(
        name="added",
        cost="mode",
        of=_added,
        holds=lambda source, requires_grad: f"not {source.ask(records_gradients)} or not {source.ask(requires_grad)}",
        message=lambda requires_grad, call: (
            "an adapter or a submodule that was put in requires grad, and at capture a part of the model recorded "
            "no gradients because nothing before it required grad (a reentrant checkpoint does so). Export the model "
            "with a parameter or argument before that part that requires grad"
        ),
    ),
    GuardRule(
        name="ties",
        cost="tensor",
        of=lambda caller: caller.ties,
        holds=_is_tied,
        error=NotSupported,
        message=lambda tie, call: (
            ", ".join(f"`{name}`" for name in (tie[2].name, *tie[2].tied))
            + " are one tensor in the programs, and no longer are in the module"
        ),
    ),
)
"""Guards of the module's tensors, for calls whose arguments fit."""
