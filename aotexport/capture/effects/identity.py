"""Find code that asks whether two values are one object (`x is y`), which tracing does not see."""

from __future__ import annotations

import dis
from collections.abc import Callable
from types import CodeType
from typing import Any

from torch import nn

from aotexport.capture.effects.own_code import own_code

_ASKS = ("IS_OP", "BUILD_SET")
_ATTRIBUTE = ("LOAD_ATTR", "LOAD_METHOD")
_NAMED_IN_CODE = ("LOAD_CONST", "LOAD_GLOBAL", "LOAD_NAME")


def asks_identity(target: nn.Module | Callable[..., Any], module: nn.Module | None) -> bool:
    """Return whether the model's own code asks: it has `is`, `id` or a set, of values that it computes.

    Args:
        target: the traced callable.
        module: its module; None: a plain function.
    """
    return any(map(_compares, own_code(target, module)))


def _compares(code: CodeType) -> bool:
    """Return whether `code` asks of something that is no constant, global or attribute of one."""
    if "id" in code.co_names:
        return True
    root = ""
    for instruction in dis.get_instructions(code):
        if instruction.opname in _ASKS and root not in _NAMED_IN_CODE:
            return True
        if instruction.opname not in _ATTRIBUTE:
            root = instruction.opname
    return False
