"""Put back the attributes of the model that a call changes under tracing, and note or refuse the changes.

Tracing records tensor operators only. A program that left out a change of Python state would be silently wrong.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from aotexport.capture.effects.record import Effects
from aotexport.errors import ExportFailed
from aotexport.model.attributes import (
    AttributeChanged,
    Attributes,
    ChangedOnFirstCall,
    PythonStateChanged,
)
from aotexport.model.containers import ItemChange

_NUMBERS = bool | int | float | str
_TABLE = re.compile(r"\.?_(?:buffers|parameters|modules)\['([^']+)'\]")
_BASE_ATTRIBUTES = frozenset(vars(nn.Module()))
_WEIGHTS = frozenset(("_flat_weights", "_flat_weight_refs"))
"""Lists that recurrent layers make anew where their parameters are others, as in a trace; source: `nn.RNNBase`."""
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


@contextlib.contextmanager
def attributes_kept(module: nn.Module | None, effects: Effects) -> Iterator[None]:
    """Put the attributes of the model back after the block, and note in `effects` those that the bundle drops.

    Raises:
        ExportFailed: the block changed Python state that the model's next call may depend on.
    """
    before = Attributes.of(module)
    try:
        yield
    finally:
        items, changes = before.changed_items(), before.changed()
        before.put_back()
    _judge_items(items, effects)
    _judge(changes, effects)


def _judge_items(changes: list[ItemChange], effects: Effects) -> None:
    for change in changes:
        if any(table in change.path for table in _HOOKS):
            raise ChangedOnFirstCall(
                "the call registers hooks on modules, which a bundle cannot hold. Register them before the export"
            )
        path = _TABLE.sub(r".\1", change.path).lstrip(".")
        attribute = _attribute(change.path)
        if change.is_attribute and attribute is not None:
            effects.stored.append(attribute)
            continue
        if isinstance(change.new, torch.Tensor) and isinstance(change.old, _NUMBERS | None):
            effects.notes.append(f"the tensor that the call stores in `{path}` is not kept by the bundle")
            if attribute is not None:
                effects.stored.append(attribute)
            continue
        message = (
            f"the call changes `{path}` of the model, and a bundle has no Python state. Keep tensors as "
            "buffers (`register_buffer`) and change them in place; count and collect outside of the call"
        )
        if attribute is None:
            raise ExportFailed(message)
        raise PythonStateChanged([*(a for other in changes if (a := _attribute(other.path))), *effects.stored], message)


def _attribute(path: str) -> str | None:
    """Return the path of the attribute, or buffer, whose item changed; None: it is one of torch's tables."""
    table = re.match(r"(.*?)\.?_buffers\['([^']+)'\]$", path)
    if table is not None:
        return ".".join(filter(None, table.groups()))
    name = path.partition("[")[0]
    return None if name.rpartition(".")[2] in _BASE_ATTRIBUTES else name


def _judge(changes: list[tuple[str, Any, Any]], effects: Effects) -> None:
    for name, old, new in changes:
        if isinstance(new, _NUMBERS) and type(old) is type(new) and old != new:
            raise AttributeChanged(name, old, new)
        if name.rpartition(".")[2] not in _BASE_ATTRIBUTES | _WEIGHTS:
            effects.stored.append(name)
        if isinstance(new, torch.Tensor) and not isinstance(old, torch.Tensor):
            effects.notes.append(f"the tensor that the call stores in `{name}` is not kept by the bundle")
