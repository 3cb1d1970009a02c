"""Find code that asks whether two values are one object (`x is y`), which tracing does not see."""

from __future__ import annotations

import dis
from collections.abc import Callable
from types import CodeType
from typing import Any

from torch import nn

from aotexport.capture.effects.own_code import own_code

_VARIABLE = ("LOAD_FAST", "LOAD_DEREF")


def asks_identity(target: nn.Module | Callable[..., Any], module: nn.Module | None) -> bool:
    """Return whether the model's own code asks: by `is` of variables or items, `id` of a variable, or a set of them.

    Args:
        target: the traced callable.
        module: its module; None: a plain function.
    """
    return any(map(_asks, own_code(target, module)))


def _asks(code: CodeType) -> bool:
    found = list(dis.get_instructions(code))
    for before, here, ask in zip(found, found[1:], found[2:], strict=False):
        # Newer Pythons load two variables, or store one and load another, by one instruction.
        if ask.opname == "IS_OP" and (_is_item(here) or (_is_variable(here) and _is_first(before, here))):
            return True
        if ask.opname == "BUILD_SET" and (ask.arg or 0) > 1 and _is_variable(here):
            return True
        if here.opname == "LOAD_GLOBAL" and here.argval == "id" and _is_variable(ask):
            return True
    return False


def _is_first(before: dis.Instruction, second: dis.Instruction) -> bool:
    """Return whether the operand before `second` is a variable or an item, too."""
    return second.opname.count("LOAD_") == 2 or _is_item(before) or any(name in before.opname for name in _VARIABLE)


def _is_variable(instruction: dis.Instruction) -> bool:
    return instruction.opname.startswith(_VARIABLE)


def _is_item(instruction: dis.Instruction) -> bool:
    return instruction.opname == "BINARY_SUBSCR" or (instruction.opname, instruction.argrepr) == ("BINARY_OP", "[]")
