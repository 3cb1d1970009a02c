"""Tensors that a call may change: data, metadata and gradients, compared and put back; those within reach of code."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass
from types import BuiltinFunctionType, CodeType, FrameType, FunctionType, ModuleType
from typing import Any

import torch
from torch import nn

from aotexport.model.memory_snapshots import MemorySnapshot, copied, spans_of
from aotexport.model.source_lines import is_user_file
from aotexport.model.state import State
from aotexport.model.tensor_kinds import why_not_held
from aotexport.process.blocks import uninterrupted
from aotexport.process.objects import is_a
from aotexport_runtime.values.subclasses import is_wrapper, parts

UNCHANGED = "unchanged"
"""Marks a value that a call has left unchanged."""
_NOT_ENTERED = (type, ModuleType, CodeType, FrameType, BuiltinFunctionType, str, bytes, bool, int, float, type(None))
_LEAVES = frozenset(_NOT_ENTERED)
"""Found sooner than by `isinstance`, which goes through all types."""


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


class Tensors:
    """Tensors as they were: their memory, metadata and gradients."""

    def __init__(self, tensors: Iterable[torch.Tensor], memory: Iterable[MemorySnapshot] | None = None) -> None:
        """Remember them.

        Args:
            tensors: each object once.
            memory: snapshots of their memory; None: it is copied.
        """
        self.before = {id(tensor): Before.of(tensor) for tensor in tensors}
        aliases = (each.alias for each in self.before.values() if each.alias is not None)
        self._memory = list(map(copied, spans_of(aliases)) if memory is None else memory)

    def written(self) -> set[int]:
        """Return the addresses of storages whose bytes have changed since."""
        return {span.memory.untyped_storage().data_ptr() for span in self._memory if not span.is_unchanged()}

    def are_unchanged(self) -> bool:
        """Return whether all have their place and their bytes."""
        in_place = (b.alias is not None and b.tensor.is_set_to(b.alias) for b in self.before.values())
        return all(in_place) and not self.written()

    def put_back(self) -> None:
        """Put all back as they were."""
        for span in self._memory:
            span.put_back()
        for each in self.before.values():
            each.put_back()


class StateSnapshot:
    """The state of a model as it is now: tensors and their places, the random generator and the grad mode."""

    def __init__(self, state: State, outside: Iterable[torch.Tensor] = ()) -> None:
        """Remember the state of a model, and further tensors that calls may change."""
        tensors = [entry.tensor for entry in state.entries]
        tensors += [part for tensor in tensors if is_wrapper(tensor) for part in parts(tensor)]
        self._state = Tensors(tensors, state.snapshots)
        self._others = Tensors(tensor for tensor in outside if id(tensor) not in self._state.before)
        self._slots = [(table, key, table[key]) for entry in state.entries for table, key in entry.slots]
        self._random_state = torch.get_rng_state()
        self._grad_mode = torch.is_grad_enabled()

    def changes(self) -> list[Any]:
        """Return the current values of the state: `UNCHANGED`, or a copy of the new value."""
        written, known = self._state.written(), self._state.before

        def is_same(value: torch.Tensor, was: torch.Tensor) -> bool:
            if is_wrapper(was):
                return value is was and all(is_same(part, part) for part in parts(was))
            return id(was) in known and known[id(was)].is_equal(value, written)

        def look(value: Any, was: torch.Tensor) -> Any:
            if not isinstance(value, torch.Tensor):
                return value
            return UNCHANGED if is_same(value, was) else value.detach().clone()

        return [look(table[key], tensor) for table, key, tensor in self._slots]

    def drop_gradients(self) -> None:
        """Let calls accumulate gradients from nothing."""
        for each in self._state.before.values():
            if each.tensor.is_leaf:
                each.tensor.grad = None

    def put_back(self) -> None:
        """Put everything back as it was."""
        with uninterrupted():
            torch.set_grad_enabled(self._grad_mode)
            torch.set_rng_state(self._random_state)
            for table, key, tensor in self._slots:
                table[key] = tensor
            self._state.put_back()
            self._others.put_back()


@contextlib.contextmanager
def restored(state: State, outside: Iterable[torch.Tensor] = ()) -> Iterator[StateSnapshot]:
    """Let calls change the state, first without gradients, and data of tensors outside; put it back after the block."""
    snapshot = StateSnapshot(state, outside)
    try:
        snapshot.drop_gradients()
        yield snapshot
    finally:
        snapshot.put_back()


def reached_tensors(roots: Iterable[Any]) -> list[torch.Tensor]:
    """Return the plain tensors within reach of models, functions or arguments, each once; see `reached`."""
    tensors = (value for value in reached(roots) if is_a(value, torch.Tensor))
    return [tensor for tensor in tensors if type(tensor) in (torch.Tensor, nn.Parameter)]


def reached(roots: Iterable[Any]) -> list[torch.Tensor | nn.Module]:
    """Return the tensors and modules within reach of models, functions or arguments, each once.

    Functions are followed to their closures and to the globals that they name; classes are not entered, except for the
    attributes of modules' classes.

    Args:
        roots: objects to start from.
    """
    found: list[torch.Tensor | nn.Module] = []
    pending = list(roots)
    # `seen` keeps the objects alive, so that no other object gets their id.
    seen: dict[int, Any] = {}
    while pending:
        value = pending.pop()
        if type(value) in _LEAVES or id(value) in seen or is_a(value, *_NOT_ENTERED):
            continue
        seen[id(value)] = value
        if is_a(value, torch.Tensor):
            found.append(value)
        elif is_a(value, FunctionType):
            pending += _of_function(value) if is_user_file(value.__code__.co_filename) else ()
        else:
            pending += gc.get_referents(value)
            if is_a(value, nn.Module):
                found.append(value)
                bases = [base for base in type(value).__mro__[:-1] if id(base) not in seen]
                seen.update((id(base), base) for base in bases)
                pending += [item for base in bases for item in vars(base).values()]
    return found


def _of_function(function: FunctionType) -> Iterator[Any]:
    yield from function.__closure__ or ()
    yield function.__defaults__
    yield function.__kwdefaults__
    for name in _names(function.__code__):
        yield function.__globals__.get(name)


def _names(code: CodeType) -> set[str]:
    nested = [_names(constant) for constant in code.co_consts if isinstance(constant, CodeType)]
    return set(code.co_names).union(*nested)
