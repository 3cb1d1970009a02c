"""Put the state of a model back after a call for real, and everything of the caller's after an export."""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from aotexport.model.attributes import Attributes
from aotexport.model.globals import globals_to_put_back
from aotexport.model.memory_snapshots import copied, spans_of
from aotexport.model.reach import reached
from aotexport.model.state import State
from aotexport.model.tensor_kinds import why_not_held
from aotexport.process.blocks import uninterrupted
from aotexport.torch_internals.outside import set_version
from aotexport_runtime.values.subclasses import is_wrapper, parts

UNCHANGED = "unchanged"
"""Marks a value that a call has left unchanged."""


class StateSnapshot:
    """The state of a model as it is now: data, metadata, gradients, places, the random generator and the grad mode."""

    def __init__(self, state: State, outside: Iterable[torch.Tensor] = ()) -> None:
        """Remember the state of a model, and data and metadata of further tensors that calls may change."""
        self._state = [
            Before.of(tensor)
            for entry in state.entries
            for tensor in (entry.tensor, *(parts(entry.tensor) if is_wrapper(entry.tensor) else ()))
        ]
        known = {id(each.tensor) for each in self._state}
        self._others = [Before.of(tensor) for tensor in outside if id(tensor) not in known]
        spans = spans_of(part for entry in state.entries for part in parts(entry.tensor))
        self._memory = state.snapshots if state.snapshots is not None else [copied(span) for span in spans]
        aliases = [other.alias for other in self._others if other.alias is not None]
        self._copies = [copied(span) for span in spans_of(aliases)]
        self._slots = [(table, key, table[key]) for entry in state.entries for table, key in entry.slots]
        self._random_state = torch.get_rng_state()
        self._grad_mode = torch.is_grad_enabled()

    def changes(self) -> list[Any]:
        """Return the current values of the state: `UNCHANGED`, or a copy of the new value."""
        written = {span.memory.untyped_storage().data_ptr() for span in self._memory if not span.is_unchanged()}
        known = {id(each.tensor): each for each in self._state}

        def is_same(value: torch.Tensor, was: torch.Tensor) -> bool:
            if is_wrapper(was):
                return value is was and all(is_same(part, part) for part in parts(was))
            found = known.get(id(was))
            return found is not None and found.is_equal(value, written)

        def look(value: Any, was: torch.Tensor) -> Any:
            if not isinstance(value, torch.Tensor):
                return value
            return UNCHANGED if is_same(value, was) else value.detach().clone()

        return [look(table[key], tensor) for table, key, tensor in self._slots]

    def drop_gradients(self) -> None:
        """Let calls accumulate gradients from nothing."""
        for each in self._state:
            if each.tensor.is_leaf:
                each.tensor.grad = None

    def put_back(self) -> None:
        """Put everything back as it was."""
        with uninterrupted():
            torch.set_grad_enabled(self._grad_mode)
            torch.set_rng_state(self._random_state)
            for table, key, tensor in self._slots:
                table[key] = tensor
            for span in (*self._memory, *self._copies):
                span.put_back()
            for tensor in (*self._state, *self._others):
                tensor.put_back()


@contextlib.contextmanager
def restored(state: State, outside: Iterable[torch.Tensor] = ()) -> Iterator[StateSnapshot]:
    """Let calls change the state, first without gradients, and data of tensors outside; put it back after the block."""
    snapshot = StateSnapshot(state, outside)
    try:
        snapshot.drop_gradients()
        yield snapshot
    finally:
        snapshot.put_back()


@dataclass(frozen=True)
class Before:
    """A tensor as it was: an alias of its memory with its sizes and strides, and its autograd metadata.

    A tensor subclass has no memory of its own; its parts have a `Before` of their own.
    """

    tensor: torch.Tensor
    alias: torch.Tensor | None
    is_leaf: bool
    requires_grad: bool
    grad: torch.Tensor | None

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Before:
        """Return the record of `tensor` as it is now."""
        alias = None if is_wrapper(tensor) or why_not_held(tensor) else tensor.detach()
        grad = tensor.grad if tensor.is_leaf else None
        return cls(tensor, alias, tensor.is_leaf, tensor.requires_grad, grad)

    def is_equal(self, value: torch.Tensor, written: Container[int]) -> bool:
        """Return whether a value equals the recorded tensor; `written`: addresses of storages that changed since."""
        was = self.alias
        if was is None or is_wrapper(value) or was.untyped_storage().data_ptr() in written:
            return False
        alike = (value.dtype, value.shape, value.stride()) == (was.dtype, was.shape, was.stride())
        return alike and (value.is_set_to(was) or bool((value == was).all()))

    def put_back(self) -> None:
        """Undo changes of the tensor since; its memory is put back separately."""
        if self.alias is not None and not self.tensor.is_set_to(self.alias):
            self.tensor.data = self.alias
        if self.is_leaf and not self.tensor.is_leaf and not self.tensor._is_view():
            self.tensor.detach_()
        if self.tensor.is_leaf:
            self.tensor.requires_grad_(self.requires_grad)
            self.tensor.grad = self.grad


@contextlib.contextmanager
def left_alone(target: Any, others: Iterable[Any]) -> Iterator[None]:
    """Leave the caller's model, arguments and random generators as they were, however the block ends.

    Captures and recorded calls undo their own changes. This undoes the rest: torch's marks and versions on tensors,
    changes by code of the caller that was never traced, and interrupted calls.

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
