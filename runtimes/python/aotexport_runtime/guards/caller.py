"""Guards of a program's caller: modes of the process, and the module's tensors that the program reads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from aotexport_runtime.errors import NotSupported
from aotexport_runtime.execution.autocast import autocast_dtype, device_type_of
from aotexport_runtime.guards.rule import Call, GuardSource, Row, input_name
from aotexport_runtime.schema.manifest import StateTensor
from aotexport_runtime.schema.program import Program, Question, SizeInput, StateInput
from aotexport_runtime.schema.trees import Leaf
from aotexport_runtime.submodules.tables import StateSlot, is_sharded
from aotexport_runtime.values.subclasses import Form, is_wrapper
from aotexport_runtime.values.trees import leaves


def has_hooks(tensor: torch.Tensor) -> bool:
    """Return whether `tensor` has hooks or retains its gradient."""
    return tensor.retains_grad or bool(tensor._backward_hooks)


def records_gradients() -> bool:
    """Return the grad mode of the caller; an export of a loaded bundle answers for the call that it captures."""
    return torch.is_grad_enabled()


def without_autocast(source: GuardSource, device_type: str) -> str:
    """Return source that asks quickly whether autocast is off for a type of devices."""
    if not torch.amp.is_autocast_available(device_type):
        return "True"
    return f"not {source.ask(torch.is_autocast_enabled, source.constant(device_type))}"


def mode_rows(program: Program, device_type: str) -> list[Row]:
    """Return the guards of modes that the model's code read; `device_type`: type of the devices that it runs on."""
    rows = {
        "grad_mode": Row(
            "mode",
            lambda source: f"{source.ask(records_gradients)} is {program.grad}",
            f"gradients: expected torch.is_grad_enabled() to be {program.grad}, as at capture, since the model's code "
            f"reads it; got {not program.grad}",
        ),
        "inference_mode": Row(
            "mode",
            lambda source: f"not {source.ask(torch.is_inference_mode_enabled)}",
            "gradients: torch.inference_mode() records nothing for the gradients that the model itself takes, or the "
            "model's code asks whether it is on; use torch.no_grad()",
        ),
        "autocast": _autocast(program, device_type),
    }
    return [row for name, row in rows.items() if name in program.fixed]


def _autocast(program: Program, here: str) -> Row:
    then, there = program.autocast, device_type_of(program, None)

    def same(source: GuardSource) -> str:
        if then is not None and here != there:
            return "False"
        return f"{source.ask(autocast_dtype, source.constant(here))} == {source.constant(then)}"

    def message(_: Call) -> str:
        now, reason = autocast_dtype(here), "as at capture, since what the model's code does depends on dtypes"
        if then is not None and here != there:
            return (
                f"autocast: expected {then} on {there} around the call, {reason}; got {now or 'none'} on {here}, where "
                "autocast casts for other operators. Export the model on that device"
            )
        return (
            f"autocast: expected {then or 'none'} around the call, {reason}; got {now or 'none'}. Export the model "
            f"outside of autocast and with `--autocast {now or then}`, for both, or with its region inside of the model"
        )

    return Row("mode", same, message, quick=(lambda source: without_autocast(source, here)) if then is None else None)


def state_rows(
    program: Program,
    state: Sequence[tuple[int, dict[str, Any], str]],
    ties: Sequence[tuple[StateSlot, Sequence[StateSlot], StateTensor]],
    forms: Mapping[int, Form],
    added: Sequence[nn.Module] = (),
) -> list[Row]:
    """Return the guards of the module's tensors, for calls whose arguments fit.

    `state`: index and slot of each input that is state; `forms`: structure per such input that is a tensor subclass.
    `ties`: per tied tensor: its slot, the slots of its other names, its record. `added`: modules that the program calls
    and that were not captured.
    """
    names = {i: spec.name if isinstance(spec, StateInput) else spec.path for i, spec in enumerate(program.inputs)}
    trees = [parameter.tree for parameter in program.parameters]
    passed = {leaf.index for tree in trees for _, leaf in leaves(tree) if isinstance(leaf, Leaf)}
    found = [_present(index, table, key, names[index], index in passed) for index, table, key in state]
    for index, table, _ in state:
        if index in forms:
            found.append(_form(index, forms[index], names[index]))
        elif is_sharded(table):
            found.append(_whole(index, names[index], program.name))
    for index, _, _ in state:
        if index in passed:
            words = f"an argument that was the module's own `{names[index]}` at capture must be it again"
            found.append(Row("tensor", f"p{index} is None or p{index} is {input_name(index)}", words, held=""))
    for index in program.differentiated:
        found += _differentiated(index, names[index], program)
    found += [_question(each, [names[index] for index in each.inputs]) for each in program.questions]
    if not all(question.requires_grad for question in program.questions):
        found.append(_added(added))
    return found + [_tie(*tie) for tie in ties]


def _present(index: int, table: dict[str, Any], key: str, name: str, is_passed: bool) -> Row:
    value = input_name(index)

    def taken(source: GuardSource) -> list[str]:
        lines = [f"p{index} = {value}"] if is_passed else []
        lines.append(f"{value} = {source.constant(table)}.get({source.constant(key)})")
        return [*lines, f"inputs[{index}] = {value}"] if source.explains else lines

    return Row(
        "tensor",
        f"{value} is not None",
        f"the module's `{name}` is gone or was replaced by something that is computed (pruning, parametrization), and "
        "the programs read it. Change the model, and export it again",
        prepare=taken,
        held="True",
        error=NotSupported,
    )


def _whole(index: int, name: str, program: str) -> Row:
    return Row(
        "tensor",
        lambda source: f"not {source.ask(is_wrapper, input_name(index))}",
        f"`{name}` is in parts over processes here, and program `{program}` reads it whole: `fully_shard` gathers it "
        "for calls of the module that it was given. Give it the loaded module too, and call that (methods after "
        "`register_fsdp_forward_method`)",
        held="",
        error=NotSupported,
    )


def _form(index: int, form: Form, name: str) -> Row:
    return Row(
        "tensor",
        lambda source: f"{source.ask(form.why_not, input_name(index))} is None",
        lambda call: f"the module's `{name}`: {form.why_not(call.inputs[index])}",
        quick="",
        error=NotSupported,
    )


def _differentiated(index: int, name: str, program: Program) -> list[Row]:
    """Return the rows about an input with regard to which the model takes gradients."""
    spec, value = program.inputs[index], input_name(index)
    assert not isinstance(spec, SizeInput)
    hooks = Row(
        "tensor",
        lambda source: f"not {source.ask(has_hooks, value)}",
        f"`{name}`: expected neither hooks nor a retained gradient: the model takes gradients with regard to it, and "
        "eager would call them in the call, which a graph does not; pass a view of it, which has none",
        held="",
    )
    words = f"`{name}`: expected requires_grad=True, as at capture, since the model takes gradients with regard to it; "
    return [hooks, *([Row("tensor", f"{value}.requires_grad", words + "got False")] if spec.meta.requires_grad else [])]


def _question(question: Question, names: Sequence[str]) -> Row:
    expected = question.requires_grad
    some = " or ".join(f"{input_name(index)}.requires_grad" for index in question.inputs)
    quoted = [f"`{name}`" for name in names]
    listed = " and ".join([*filter(None, [", ".join(quoted[:-1])]), *quoted[-1:]])
    which = "" if len(names) == 1 else " of one of them" if expected else " of each"
    reader = "gradients of the model depend on it" if question.recording else "the model's code reads it"

    def is_answered(source: GuardSource) -> str:
        same = f"({some or 'False'}) is {expected}"
        return f"{same} or not {source.ask(records_gradients)}" if question.recording else same

    return Row(
        "tensor",
        is_answered,
        f"{listed}: expected requires_grad={expected}{which}, as at capture, since {reader}; got {not expected}. Set "
        "it so, or export the model with it as it is now",
        held="",
    )


def _added(modules: Sequence[nn.Module]) -> Row:
    def requires_grad() -> bool:
        return any(each.requires_grad for module in modules for each in module.parameters())

    return Row(
        "mode",
        lambda source: f"not {source.ask(records_gradients)} or not {source.ask(requires_grad)}",
        "an adapter or a submodule that was put in requires grad, and at capture a part of the model recorded no "
        "gradients because nothing before it required grad (a reentrant checkpoint does so). Export the model with a "
        "parameter or argument before that part that requires grad",
    )


def _tie(slot: StateSlot, others: Sequence[StateSlot], entry: StateTensor) -> Row:
    def is_tied(source: GuardSource) -> str:
        value, *rest = (f"{source.constant(table)}.get({source.constant(key)})" for table, key in (slot, *others))
        return " and ".join(f"{other} is {value}" for other in rest)

    names = ", ".join(f"`{name}`" for name in (entry.name, *entry.tied))
    words = f"{names} are one tensor in the programs, and no longer are in the module"
    return Row("tensor", is_tied, words, held="True", error=NotSupported)
