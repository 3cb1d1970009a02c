"""Leave the caller's model, arguments and random generators as an export found them, however it ends.

Captures and recorded calls undo their own changes. This block around all of them undoes the rest: torch's marks and
versions on tensors, changes by code of the caller that was never traced, and interrupted calls. The values of tensors
are put back by `restored`, around each change.
"""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from aotexport.model.attributes import Attributes
from aotexport.model.globals import globals_to_put_back
from aotexport.model.reach import reached
from aotexport.model.restore import Before
from aotexport.process.blocks import uninterrupted
from aotexport.torch_internals.outside import set_version


@contextlib.contextmanager
def left_alone(target: Any, others: Iterable[Any]) -> Iterator[None]:
    """Put back everything that the block changes.

    Args:
        target: the model, a method of it, or a function.
        others: arguments, and other objects with tensors of the caller.
    """
    found = reached((target, *others))
    modules = [("", value) for value in found if isinstance(value, nn.Module)]
    # Parameters that are not initialised yet are refused before anything runs, and have nothing to put back.
    tensors = [_TensorBefore.of(value) for value in found if isinstance(value, torch.Tensor) and not is_lazy(value)]
    module = target if isinstance(target, nn.Module) else getattr(target, "__self__", None)
    attributes = Attributes(modules)
    globals_ = globals_to_put_back(target, module if isinstance(module, nn.Module) else None)
    generators = _generators()
    try:
        yield
    finally:
        with uninterrupted():
            attributes.put_back()
            globals_()
            for tensor in tensors:
                tensor.put_back()
            for put_back, state in generators:
                put_back(state)


@dataclass(frozen=True)
class _TensorBefore:
    """A tensor with its attributes and its version, the number of writes to it."""

    before: Before
    attributes: dict[str, Any]
    version: int | None

    @classmethod
    def of(cls, tensor: torch.Tensor) -> _TensorBefore:
        return cls(Before.of(tensor), dict(vars(tensor)), None if tensor.is_inference() else tensor._version)

    def put_back(self) -> None:
        tensor = self.before.tensor
        self.before.put_back()
        vars(tensor).clear()
        vars(tensor).update(self.attributes)
        # The bytes are those of that version again, so a backward from before the export accepts its saved tensors.
        if self.version is not None and tensor._version != self.version:
            set_version(tensor, self.version)


def _generators() -> list[tuple[Any, Any]]:
    """Return, per random generator, the function that sets its state, and its state."""
    states: list[tuple[Any, Any]] = [(torch.set_rng_state, torch.get_rng_state()), (random.setstate, random.getstate())]
    if torch.cuda.is_initialized():
        states.append((torch.cuda.set_rng_state_all, torch.cuda.get_rng_state_all()))
    if "numpy" in sys.modules:
        numpy = sys.modules["numpy"].random
        states.append((numpy.set_state, numpy.get_state()))
    return states
