"""What a call changes beside tensors: attributes of the model, globals, classes and closures of its code, generators.

Tracing sees none of it. All is put back; what a bundle drops is told, and what later calls would miss is refused.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import pickle
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from types import FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.parameter import is_lazy

from aotexport.errors import ExportFailed
from aotexport.model.source_lines import is_user_file
from aotexport.process.blocks import uninterrupted
from aotexport.process.objects import file_of, is_a, namespace_of
from aotexport.state.tables import CONTAINERS, Change, Table, is_user_class, table_of, tables_in
from aotexport.state.tensors import Before, reached
from aotexport.torch_internals.calls import FakeTensor, tree_leaves
from aotexport.torch_internals.outside import set_version

_NUMBERS = bool | int | float | str
_TABLES_OF_STATE = ("_parameters", "_buffers", "_modules")
_BASE_ATTRIBUTES = frozenset(vars(nn.Module()))
_WEIGHTS = frozenset(("_flat_weights", "_flat_weight_refs"))
"""Lists that recurrent layers make anew where their parameters are others, as in a trace; source: `nn.RNNBase`."""
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class ChangedOnFirstCall(ExportFailed):
    """The call changed the model as a first call may; after one call for real, the next may change nothing."""


class PythonStateChanged(ExportFailed):
    """The call changed attributes that later calls read, or may read.

    Attributes:
        names: the attributes' paths.
    """

    def __init__(self, names: Iterable[str], message: str) -> None:
        super().__init__(message)
        self.names = tuple(dict.fromkeys(names))


class AttributeChanged(ExportFailed):
    """The call changed numbers, flags or strings of the model.

    Attributes:
        changes: per attribute its path, and its values before and after.
    """

    def __init__(self, changes: Sequence[tuple[str, Any, Any]]) -> None:
        name, old, new = changes[0]
        super().__init__(
            f"the call changes the attribute `{name}` of the model from {old!r} to {new!r}, and a bundle has no "
            "Python state. Keep it as a buffer (`register_buffer`) and change it in place, or outside of the call"
        )
        self.changes = changes


class World:
    """Tables as they were, found before anything changes them."""

    def __init__(self, tables: Iterable[Table]) -> None:
        self.tables = list(tables)

    @classmethod
    def of(cls, module: nn.Module | None) -> World:
        """Return the attributes of a model, and what they hold; nothing for a function."""
        return cls(() if module is None else _of_modules(module.named_modules()))

    @classmethod
    def outside(cls, target: Any, module: nn.Module | None) -> World:
        """Return globals, classes and closures of the code of a callable and its model, and what they hold."""
        return cls(_of_code(target, module))

    def changes(self) -> list[Change]:
        """Return the changes since."""
        return [change for table in self.tables for change in table.changes()]

    def is_unchanged(self) -> bool:
        """Return whether everything is as it was."""
        return not any(table.has_changed() for table in self.tables)

    def put_back(self) -> None:
        """Put everything back as it was."""
        for table in self.tables:
            table.put_back()

    def undoing(self) -> Callable[[], None]:
        """Return a function that undoes the changes until now, and no later ones."""
        changed = [(table, {change.key for change in table.changes()}) for table in self.tables]

        def undo() -> None:
            for table, keys in changed:
                table.put_back(keys)

        return undo


@contextlib.contextmanager
def attributes_restored(module: nn.Module | None) -> Iterator[None]:
    """Put the attributes of the model, and their items, back after the block."""
    before = World.of(module)
    try:
        yield
    finally:
        before.put_back()


def _of_modules(modules: Iterable[tuple[str, nn.Module]]) -> Iterator[Table]:
    for path, child in modules:
        yield (own := table_of(child, path))
        for name, value in own.items.items():
            if name in _TABLES_OF_STATE:
                yield table_of(value, path, own.path_of(name))
            else:
                yield from tables_in(value, own.path_of(name), seen=set())


def _of_code(target: Any, module: nn.Module | None) -> Iterator[Table]:
    """Yield globals of the user's files that define the model's classes, or the function; these classes; closures."""
    classes = _classes(module)
    names = {type(child).__module__ for child in module.modules()} if module is not None else set()
    names.add(getattr(target, "__module__", None) or type(target).__module__)
    found = [sys.modules[name] for name in sorted(names) if name in sys.modules]
    owners: list[Any] = [owner for owner in found if is_user_file(file_of(owner) or "<built-in>")]
    owners += filter(is_user_class, classes)
    methods = [value for owner in owners if is_a(owner, type) for value in vars(owner).values()]
    owners += [function for function in (*methods, target) if is_a(function, FunctionType) and function.__closure__]
    seen: set[int] = set()
    for owner in owners:
        yield (own := table_of(owner, owner.__name__ if is_a(owner, type) else ""))
        for name, value in own.items.items():
            if name != "__warningregistry__":  # Python's own.
                yield from tables_in(value, own.path_of(name), enters=None, seen=seen)


def _classes(module: nn.Module | None) -> set[type]:
    return set() if module is None else {base for child in module.modules() for base in type(child).__mro__}


# --- what a call changes --------------------------------------------------------------------------------------


@dataclass
class Told:
    """What a call stored, once its block has ended.

    Attributes:
        stored: paths of attributes, perhaps for later calls.
        notes: sentences for the user.
    """

    stored: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


@contextlib.contextmanager
def world_kept(target: Any, module: nn.Module | None) -> Iterator[Told]:
    """Put attributes of the model, globals, classes, closures and memos of its code back after the block.

    Args:
        target: the traced callable.
        module: the model; None: a function.

    Raises:
        ExportFailed: the block changed Python state that the next call may depend on, or drew from a generator that a
            bundle does not have.
    """
    attributes, outside = World.of(module), World.outside(target, module)
    drawn, told = _other_generators(), Told()
    try:
        yield told
    finally:
        within, beside = attributes.changes(), outside.changes()
        attributes.put_back()
        outside.put_back()
        _forget_fakes(outside, module)
    _judge_outside(beside, told)
    for name, state in _other_generators().items():
        if state != drawn[name]:
            raise ExportFailed(
                f"the call draws from {name}, and a bundle draws from torch's default generator alone. Draw by torch "
                "(`torch.rand`), or outside of the model, and pass the numbers"
            )
    _judge_items([change for change in within if not is_a(change.table.owner, nn.Module)], told)
    _judge_attributes([change for change in within if is_a(change.table.owner, nn.Module)], told)


def _judge_outside(changes: list[Change], told: Told) -> None:
    # Truth values are flags (a warning was given); the recorded calls show whether they matter.
    counted = [change.path for change in changes if type(change.old) in (int, float)]
    if counted:
        raise ExportFailed(
            f"the call changes the number `{counted[0]}`, which is in no module, and a bundle has no other Python "
            "state. Keep it as a buffer (`register_buffer`) and change it in place, or outside of the call"
        )
    numbers = (int, float, torch.SymInt, torch.SymFloat)
    stored = [f"a tensor in `{c.path}`" for c in changes if any(is_a(x, torch.Tensor) for x in tree_leaves(c.new))]
    stored += [f"a number in `{c.path}`" for c in changes if c.old is None and type(c.new) in numbers]
    told.notes += [
        f"the call stores {what}, outside of the module; a call of the bundle does not"
        for what in dict.fromkeys(stored)
    ]


def _judge_items(changes: list[Change], told: Told) -> None:
    for change in changes:
        owner, name = change.table.owner, change.table.root.rpartition(".")[2]
        if name.startswith(_HOOKS):
            raise ChangedOnFirstCall(
                "the call registers hooks on modules, which a bundle cannot hold. Register them before the export"
            )
        attribute = _attribute(change)
        of_state = name in _TABLES_OF_STATE
        if attribute is not None and not is_a(owner, *CONTAINERS):
            told.stored.append(attribute)
            continue
        is_tensor = isinstance(change.new, torch.Tensor)
        is_of_model = attribute is not None and not of_state
        replaces = isinstance(change.old, torch.Tensor) and is_of_model
        adds = change.old is None and is_of_model and not isinstance(change.new, _NUMBERS | None)
        if adds or (is_tensor and (replaces or isinstance(change.old, _NUMBERS | None))):
            what = "tensor" if is_tensor else "object"
            told.notes.append(f"the {what} that the call stores in `{change.path}` is not kept by the bundle")
            if attribute is not None:
                told.stored.append(attribute)
            continue
        message = (
            f"the call changes `{change.path}` of the model, and a bundle has no Python state. Keep tensors as "
            "buffers (`register_buffer`) and change them in place; count and collect outside of the call"
        )
        if attribute is None:
            raise ExportFailed(message)
        raise PythonStateChanged([*filter(None, map(_attribute, changes)), *told.stored], message)


def _attribute(change: Change) -> str | None:
    """Return the path of the attribute, or buffer, whose item changed; None: it is one of torch's tables."""
    name = change.table.root.rpartition(".")[2]
    if name == "_buffers":
        return change.path
    return None if name in _BASE_ATTRIBUTES else change.table.root


def _judge_attributes(changes: list[Change], told: Told) -> None:
    numbers = [c[:3] for c in changes if isinstance(c.new, _NUMBERS) and type(c.old) is type(c.new)]
    if numbers:
        raise AttributeChanged(numbers)
    for change in changes:
        if change.key not in _BASE_ATTRIBUTES | _WEIGHTS:
            told.stored.append(change.path)
        if isinstance(change.new, torch.Tensor) and not isinstance(change.old, torch.Tensor):
            told.notes.append(f"the tensor that the call stores in `{change.path}` is not kept by the bundle")


def _other_generators() -> dict[str, bytes]:
    """Return the states of Python's and NumPy's generators."""
    return {
        "Python's `random`": pickle.dumps(random.getstate()),
        "NumPy's `random`": pickle.dumps(np.random.get_state()),
    }


def _forget_fakes(outside: World, module: nn.Module | None) -> None:
    """Empty the memos (`functools.lru_cache`) that hold tensors of a trace, which have no values."""
    owners = [table.owner for table in outside.tables if is_a(table.owner, type, ModuleType)]
    defined = [value for owner in owners for value in namespace_of(owner).values() if is_a(value, type)]
    for owner in {id(owner): owner for owner in (*owners, *_classes(module), *defined)}.values():
        for value in list(namespace_of(owner).values()):
            memo = value.__func__ if is_a(value, staticmethod, classmethod, MethodType) else value
            if is_a(memo, functools._lru_cache_wrapper) and _holds_fake(gc.get_referents(memo), depth=4):
                memo.cache_clear()


def _holds_fake(values: Any, depth: int) -> bool:
    return depth > 0 and any(
        is_a(value, FakeTensor) or (is_a(value, dict, list, tuple) and _holds_fake(gc.get_referents(value), depth - 1))
        for value in values
    )


# --- a whole export -------------------------------------------------------------------------------------------


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
    # Parameters that are not initialised yet are refused before anything runs, and have nothing to put back.
    tensors = [value for value in found if isinstance(value, torch.Tensor) and not is_lazy(value)]
    before = [Before.of(tensor) for tensor in tensors]
    versions = [None if tensor.is_inference() else tensor._version for tensor in tensors]
    module = target if isinstance(target, nn.Module) else getattr(target, "__self__", None)
    tables = _of_modules(("", value) for value in found if isinstance(value, nn.Module))
    outside = _of_code(target, module if isinstance(module, nn.Module) else None)
    world = World((*tables, *outside, *(table_of(tensor, "") for tensor in tensors)))
    generators: list[Any] = [(torch.set_rng_state, torch.get_rng_state()), (random.setstate, random.getstate())]
    generators += [(np.random.set_state, np.random.get_state())]
    if torch.cuda.is_initialized():
        generators.append((torch.cuda.set_rng_state_all, torch.cuda.get_rng_state_all()))
    try:
        yield
    finally:
        with uninterrupted():
            for each in before:
                each.put_back()
            world.put_back()
            for tensor, version in zip(tensors, versions, strict=True):
                # The bytes are those of that version again, so a backward from before the export accepts its saved
                # tensors.
                if version is not None and tensor._version != version:
                    set_version(tensor, version)
            for put_back, state in generators:
                put_back(state)
