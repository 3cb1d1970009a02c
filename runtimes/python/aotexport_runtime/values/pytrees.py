"""The runtime's own containers as nodes of torch's pytrees.

`DistributedDataParallel`, `torch.func` and others search the results of a module for tensors by `torch.utils._pytree`.
An object of a class that is not registered there is a leaf to them, whose tensors they miss. torch has no public name
for the registration.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from threading import Lock
from typing import Any, Literal

Flatten = Callable[[Any], tuple[list[Any], tuple[Any, ...]]]
"""Returns the items of a container and the step to each: attribute, position or key."""

Rebuild = Callable[[Iterable[Any], Any], Any]
"""Makes a container of items and steps."""

_registered: set[type] = set()
_lock = Lock()


def register_fields(class_: type, names: tuple[str, ...]) -> None:
    """Let torch see the fields of a dataclass; does nothing where torch is not imported.

    Args:
        class_: a dataclass, whose constructor takes the fields in order.
        names: names of its fields.
    """
    _register(
        class_,
        lambda record: ([getattr(record, name) for name in names], names),
        lambda items, _: class_(*items),
        "GetAttrKey",
    )


def register_items(class_: type) -> None:
    """Let torch see the items of a subclass of list or tuple; does nothing where torch is not imported."""
    _register(
        class_,
        lambda sequence: (list(sequence), tuple(range(len(sequence)))),
        lambda items, _: class_(items),
        "SequenceKey",
    )


def register_mapping(class_: type) -> None:
    """Let torch see the values of a subclass of dict; does nothing where torch is not imported."""
    _register(
        class_,
        lambda mapping: (list(mapping.values()), tuple(mapping)),
        lambda items, keys: class_(zip(keys, items, strict=True)),
        "MappingKey",
    )


def _register(
    class_: type, flatten: Flatten, rebuild: Rebuild, key: Literal["GetAttrKey", "SequenceKey", "MappingKey"]
) -> None:
    # ONNX Runtime runs bundles without torch; a program that torch runs registers the classes of its results.
    if "torch" not in sys.modules:
        return
    from torch.utils import _pytree

    make_key = getattr(_pytree, key)

    def flatten_with_keys(container: Any) -> tuple[list[tuple[Any, Any]], tuple[Any, ...]]:
        items, steps = flatten(container)
        return list(zip(map(make_key, steps), items, strict=True)), steps

    with _lock:
        if class_ not in _registered:
            # Torch's other implementation, `torch.utils._cxx_pytree`, copies the registration when it is imported.
            _pytree.register_pytree_node(class_, flatten, rebuild, flatten_with_keys_fn=flatten_with_keys)
            _registered.add(class_)
