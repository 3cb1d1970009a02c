"""The module's state: parameters, buffers, and *constant* tensor attributes, which a call may read and replace."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import nn

from aotexport.errors import ExportFailed
from aotexport.model.memory_snapshots import MemorySnapshot
from aotexport.model.tensor_kinds import why_not_held
from aotexport.process.objects import is_a
from aotexport.values.same_tensors import are_same
from aotexport.values.subclasses import encode_subclass
from aotexport_runtime.module.bundle_module import BundleModule
from aotexport_runtime.schema.bounded import MAX_TEXT

_BASE_ATTRIBUTES = frozenset(vars(nn.Module()))

Slot = tuple[dict[str, Any], str]
Role = Literal["parameter", "buffer", "constant"]


@dataclass
class StateEntry:
    """One tensor of the state.

    Attributes:
        names: its FQNs; several when tied.
        role: see `StateTensor.role`.
        persistent: whether `state_dict` holds it.
        slots: tables of the module that hold it, with its key in each.
        is_copied: a constant that programs only copy, so that its values alone count.
    """

    tensor: torch.Tensor
    names: list[str]
    role: Role
    persistent: bool = True
    slots: list[Slot] = field(default_factory=list)
    is_copied: bool = False


@dataclass
class State:
    """The state of a module (empty for a function), in the module's order.

    Attributes:
        snapshots: snapshots of their memory between calls in files; None: every call copies the memory.
        reshaped: tensors that a captured program leaves with another shape, dtype or layout, and what it leaves.
        asked: names of attributes of the module itself that its code asked for in vain.
    """

    entries: list[StateEntry] = field(default_factory=list)
    snapshots: list[MemorySnapshot] | None = None
    reshaped: list[tuple[StateEntry, torch.Tensor]] = field(default_factory=list)
    asked: set[str] = field(default_factory=set[str])

    def add_constant(self, tensor: torch.Tensor, *, is_copied: bool = False) -> StateEntry:
        """Return the entry of a tensor that the code closes over; made at first use.

        One that `is_copied` is only copied, like what `torch.tensor` makes in each call: a copied one of the same
        values stands for it.
        """
        for entry in self.entries:
            if entry.tensor is tensor or (is_copied and entry.is_copied and are_same(entry.tensor, tensor)):
                return entry
        taken = {name for entry in self.entries for name in entry.names}
        count = sum(entry.role == "constant" for entry in self.entries)
        name = next(
            name for index in range(count, count + len(taken) + 1) if (name := f"constant.{index}") not in taken
        )
        entry = StateEntry(tensor, [name], "constant", persistent=False, is_copied=is_copied)
        self.entries.append(entry)
        return entry


def collect_state(module: nn.Module | None) -> State:
    """Return the state of `module`.

    `ExportFailed`: a parameter is not initialised yet, or is a tensor that a bundle cannot hold, or a module is
    TorchScript.
    """
    state = State()
    if module is None:
        return state
    by_id: dict[int, StateEntry] = {}
    seen_tables: set[int] = set()
    for path, child in module.named_modules(remove_duplicate=False):
        _check_name(path)
        if isinstance(child, torch.jit.ScriptModule):
            raise ExportFailed(
                f"{f'`{path}`' if path else 'the model'} is TorchScript, whose code a trace does not see; export the "
                "Python module that it was made from"
            )
        prefix = f"{path}." if path else ""
        for role, table in _tables(child):
            first = id(table) not in seen_tables
            seen_tables.add(id(table))
            for key, tensor in table.items():
                if is_a(tensor, torch.ScriptObject):
                    _refuse_packed_weights(tensor, prefix + key)
                if not is_a(tensor, torch.Tensor) or key in _BASE_ATTRIBUTES:
                    continue
                _check(tensor, prefix + key)
                entry = by_id.get(id(tensor))
                if entry is None:
                    entry = by_id[id(tensor)] = StateEntry(tensor, [], "constant", persistent=False)
                    state.entries.append(entry)
                if entry.role == "constant" and role != "constant":
                    entry.role, entry.names = role, []
                    entry.persistent = role == "parameter" or key not in child._non_persistent_buffers_set
                if role != "constant" or entry.role == "constant":
                    entry.names.append(prefix + key)
                if first:
                    entry.slots.append((table, key))
    order = {"parameter": 0, "buffer": 1, "constant": 2}
    state.entries.sort(key=lambda entry: order[entry.role])
    return state


def _tables(module: nn.Module) -> Iterator[tuple[Role, dict[str, Any]]]:
    """Yield the tables of a module that may hold tensors of the state, with the role of these."""
    yield "parameter", module._parameters
    yield "buffer", module._buffers
    yield "constant", vars(module)
    if isinstance(module, BundleModule):
        yield "constant", module.constants


def _refuse_packed_weights(value: torch.ScriptObject, name: str) -> None:
    if "torch.classes.quantized." in value._type().qualified_name():
        raise ExportFailed(
            f"`{name}` holds weights that `torch.ao.quantization` packed for this machine's kernels, which a bundle "
            "cannot hold. Quantise the model by torchao, with `quantize_` or in the steps of PT2E, and export that"
        )


def _check_name(name: str) -> None:
    if len(name) > MAX_TEXT or not name.isprintable() or name == "__metadata__":
        raise ExportFailed(
            f"the state name {name[:80]!r} cannot be stored: it is longer than {MAX_TEXT} characters, has characters "
            "that no screen shows, or is the one that safetensors keeps for itself. Rename it"
        )


def _check(tensor: torch.Tensor, name: str) -> None:
    _check_name(name)
    if isinstance(tensor, nn.UninitializedParameter | nn.UninitializedBuffer):
        raise ExportFailed(f"`{name}` is not initialised yet; call the module once before exporting it")
    if tensor._backward_hooks or getattr(tensor, "_post_accumulate_grad_hooks", None):
        raise ExportFailed(
            f"`{name}` has hooks, which a bundle cannot hold. Remove them, and register them on the loaded module's "
            "parameter"
        )
    reason = why_not_held(tensor)
    if reason is not None:
        raise ExportFailed(f"`{name}` {reason}")
    encode_subclass(tensor, f"`{name}`")


@contextlib.contextmanager
def swapped(state: State, tensors: list[Any], holder: Any = None) -> Iterator[list[tuple[StateEntry, Any]]]:
    """Put a substitute per entry in place of the state for the block, also in the modules of `holder`.

    Yields:
        list: once the block has ended, the entries that it replaced, with the new tensors.
    """
    replaced: list[tuple[StateEntry, Any]] = []
    others = _slots_in(holder)
    slots = [[*entry.slots, *others.get(id(entry.tensor), ())] for entry in state.entries]
    before = [(table, key, table[key]) for places in slots for table, key in places]
    for places, tensor in zip(slots, tensors, strict=True):
        for table, key in places:
            table[key] = tensor
    try:
        yield replaced
        for entry, tensor in zip(state.entries, tensors, strict=True):
            new = [table.get(key) for table, key in entry.slots]
            changed = [value for value in new if value is not tensor]
            if len(changed) not in (0, len(new)) or any(value is not changed[0] for value in changed):
                names = ", ".join(f"`{name}`" for name in entry.names)
                raise ExportFailed(f"the call replaces one tensor, {names}, by several, and the next call finds those")
            if changed:
                replaced.append((entry, changed[0]))
    finally:
        for table, key, tensor in before:
            table[key] = tensor


def _slots_in(holder: Any) -> dict[int, list[Slot]]:
    found: dict[int, list[Slot]] = {}
    for module in holder.modules() if isinstance(holder, nn.Module) else ():
        for _, table in _tables(module):
            for key, value in table.items():
                if is_a(value, torch.Tensor):
                    found.setdefault(id(value), []).append((table, key))
    return found
