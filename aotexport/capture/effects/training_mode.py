"""Find whether a model's code asks for its mode; if not, one trace serves both modes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.fx import graph_module

from aotexport.capture.effects.own_code import own_code
from aotexport.model.mode import has_own_switches
from aotexport.process.patches import Patch, caller, patched


@dataclass
class ModeReads:
    """Whether a model's code reads its mode.

    Attributes:
        asked: whether it may have asked for `training`.
    """

    asked: bool


@contextlib.contextmanager
def mode_watched(target: nn.Module | Callable[..., Any], module: nn.Module | None) -> Iterator[ModeReads]:
    """Watch whether code in this block asks modules for their mode.

    Args:
        target: the traced callable.
        module: its module; None: a function.
    """
    reads = ModeReads(asked=module is not None and any(map(_has_modes_of_its_own, module.modules())))
    # Code that reads an object's namespace bypasses its properties.
    reads.asked |= any({"__dict__", "vars"} & set(code.co_names) for code in own_code(target, module))

    def read(self: nn.Module) -> bool:
        # Modules around traced graphs copy the mode of the tracer's own module.
        reads.asked |= caller().f_code.co_filename != graph_module.__file__
        if "training" not in self.__dict__:
            raise AttributeError(f"'{type(self).__name__}' object has no attribute 'training'")
        return self.__dict__["training"]

    def write(self: nn.Module, mode: bool) -> None:
        self.__dict__["training"] = mode

    # A property of the class takes precedence over the object's own attribute of that name.
    with patched(Patch(nn.Module, "training", property(read, write), "Record that the model reads its mode")):
        yield reads


def _has_modes_of_its_own(module: nn.Module) -> bool:
    """Return whether a change of the mode may change more than `training`, or be read in another way."""
    kind = type(module)
    before = kind.__mro__[: kind.__mro__.index(nn.Module)]
    return has_own_switches(module) or any("training" in vars(each) for each in before)
