"""What tracing would lose: detected while the model runs, and refused by name.

Tracing keeps tensor operators. Python state that a call changes is no operator; a program without it would be silently
wrong. What torch itself does outside of operators is in `stand_ins.py`.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import nn

from aotexport.capture.autograd_functions import record_application
from aotexport.capture.checkpoints import Checkpoints
from aotexport.capture.containers import Change, Snapshot, snapshots
from aotexport.capture.patches import replaced
from aotexport.capture.sources import user_line
from aotexport.capture.stand_ins import replacements
from aotexport.errors import ExportFailed
from aotexport.torch_internals.bodies import CheckpointFunction
from aotexport.torch_internals.patches import applied_functions
from aotexport.torch_internals.subclasses import within_subclass
from aotexport.torch_internals.tracing import traces_above_autograd

_NUMBERS = (bool, int, float, str)
_TABLE = re.compile(r"\.?_(?:buffers|parameters|modules)\['([^']+)'\]")
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class ChangedOnFirstCall(ExportFailed):
    """The call changed the model as a first call may: once it has run for real, the next need not."""


class AttributeChanged(ExportFailed):
    """The call changed a number, flag or string of the model.

    Attributes:
        name: the attribute's path.
        old: what it was.
        new: what the call made of it.
    """

    def __init__(self, name: str, old: Any, new: Any) -> None:
        super().__init__(
            f"the call changes the attribute `{name}` of the model from {old!r} to {new!r}, and a bundle has no "
            "Python state. Keep it as a buffer (`register_buffer`) and change it in place, or outside of the call"
        )
        self.name, self.old, self.new = name, old, new


@dataclass
class Effects:
    """What was seen while the model ran.

    Attributes:
        above_autograd: whether the trace sees what autograd does, see `trace_forward`.
        autograd_functions: names of custom autograd functions whose backward the forward graph does not hold.
        takes_gradients: whether the model calls `torch.autograd.grad`.
        sets_requires_grad: whether the model calls `requires_grad_`, which functional graphs do not hold.
        grad: whether the calls that the program is for record gradients.
        reads: what Python code read, see `Program.fixed`.
        notes: sentences for the user about what the bundle does not reproduce.
        checkpoints: stand for those of the model.
    """

    above_autograd: bool = True
    autograd_functions: list[str] = field(default_factory=list)
    takes_gradients: bool = False
    sets_requires_grad: bool = False
    grad: bool = True
    reads: set[Literal["layout", "requires_grad", "grad_mode", "inference_mode", "identity"]] = field(
        default_factory=set
    )
    notes: list[str] = field(default_factory=list)
    checkpoints: Checkpoints = field(default_factory=lambda: Checkpoints(None))

    def applied(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], apply: Any) -> Any:
        """Apply a custom autograd function, recording it with its backward where that can be done."""
        if function is CheckpointFunction:
            return self.checkpoints.reentrant(*args)
        # Operators with bodies, and custom ones, have functions of their own; their nodes hold the whole operator.
        owners = ("torch._higher_order_ops", "torch._dynamo", "torch._library", "aotexport.")
        if function.__module__.startswith(owners):
            return apply(function, *args, **kwargs)
        reason = "a function transform surrounds it"
        if within_subclass():
            reason = "a tensor subclass applies it"
        elif traces_above_autograd():
            try:
                return record_application(function, args, kwargs)
            except Exception as error:
                reason = f"{user_line(error)}{error}"
        self.lost(function.__qualname__, reason)
        return apply(function, *args, **kwargs)

    def lost(self, name: str, reason: str) -> None:
        """Note that the forward graph does not hold the backward of a custom autograd function."""
        if name not in self.autograd_functions:
            self.autograd_functions.append(name)
            self.notes.append(
                f"the backward of the custom autograd function `{name}` is in joint graphs alone: {reason}"
            )


@contextlib.contextmanager
def observed(module: nn.Module | None, *, above_autograd: bool = True, grad: bool = True) -> Iterator[Effects]:
    """Watch the model run under tracing.

    Args:
        module: the model; None: a function.
        above_autograd: see `Effects`.
        grad: see `Effects`.

    Yields:
        What was seen, complete once the block has ended.

    Raises:
        ExportFailed: the model did something that tracing loses.
    """
    effects = Effects(
        above_autograd=above_autograd,
        grad=grad,
        checkpoints=Checkpoints(module),
    )
    before = _attributes(module)
    containers = _containers(module)
    try:
        with contextlib.ExitStack() as patches:
            patches.enter_context(applied_functions(effects.applied))
            for owner, name, replacement in (*replacements(effects), *effects.checkpoints.replacements()):
                patches.enter_context(replaced(owner, name, replacement))
            yield effects
    finally:
        items = [change for snapshot in containers for change in snapshot.changes()]
        for snapshot in containers:
            snapshot.restore()
        changes = _restore(module, before)
    _judge_items(items, effects)
    _judge(changes, effects)


def _attributes(module: nn.Module | None) -> list[tuple[str, nn.Module, dict[str, Any]]]:
    if module is None:
        return []
    return [(path, child, dict(vars(child))) for path, child in module.named_modules()]


def _containers(module: nn.Module | None) -> list[Snapshot]:
    """Return the containers that the module's attributes hold, torch's own tables of its state among them."""
    found: list[Snapshot] = []
    for path, child in module.named_modules() if module is not None else ():
        for name, value in vars(child).items():
            found += snapshots(value, f"{path}.{name}" if path else name)
    return found


def _judge_items(changes: list[Change], effects: Effects) -> None:
    for change in changes:
        if any(table in change.path for table in _HOOKS):
            raise ChangedOnFirstCall(
                "the call registers hooks on modules, which a bundle cannot hold. Register them before the export"
            )
        path = _TABLE.sub(r".\1", change.path).lstrip(".")
        if change.old is None and isinstance(change.new, torch.Tensor):
            effects.notes.append(f"the tensor that the call stores in `{path}` is not kept by the bundle")
        else:
            raise ExportFailed(
                f"the call changes `{path}` of the model, and a bundle has no Python state. Keep tensors as "
                "buffers (`register_buffer`) and change them in place; count and collect outside of the call"
            )


def _restore(
    module: nn.Module | None, before: list[tuple[str, nn.Module, dict[str, Any]]]
) -> list[tuple[str, Any, Any]]:
    """Put every attribute back; return the changed ones as `(name, old, new)`."""
    changes: list[tuple[str, Any, Any]] = []
    for path, child, old in before:
        new = vars(child)
        for key in {**old, **new}:
            if old.get(key) is not new.get(key):
                changes.append((f"{path}.{key}" if path else key, old.get(key), new.get(key)))
        new.clear()
        new.update(old)
    return changes


def _judge(changes: list[tuple[str, Any, Any]], effects: Effects) -> None:
    for name, old, new in changes:
        if isinstance(new, _NUMBERS) and type(old) is type(new) and old != new:
            raise AttributeChanged(name, old, new)
        if isinstance(new, torch.Tensor) and not isinstance(old, torch.Tensor):
            effects.notes.append(f"the tensor that the call stores in `{name}` is not kept by the bundle")
