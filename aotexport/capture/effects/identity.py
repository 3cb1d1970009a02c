"""Find code that asks whether two of its variables are one object (`x is y`), which tracing does not see."""

from __future__ import annotations

import dis
from collections.abc import Callable
from types import CodeType
from typing import Any

from torch import nn

from aotexport.capture.effects.own_code import own_code

_VARIABLE = ("LOAD_FAST", "LOAD_DEREF")


def asks_identity(target: nn.Module | Callable[..., Any], module: nn.Module | None) -> bool:
    """Return whether the model's own code, found by following names, compares variables by `is`.

    Args:
        target: the traced callable.
        module: its module; None: a plain function.
    """
    return any(map(_compares, own_code(target, module)))


def _compares(code: CodeType) -> bool:
    names = [instruction.opname for instruction in dis.get_instructions(code)]
    return any(
        # Newer Pythons load two variables, or store one and load another, by one instruction.
        last == "IS_OP" and second.startswith(_VARIABLE) and (second.count("LOAD_") == 2 or _loads_variable(first))
        for first, second, last in zip(names, names[1:], names[2:], strict=False)
    )


def _loads_variable(instruction: str) -> bool:
    return any(variable in instruction for variable in _VARIABLE)
