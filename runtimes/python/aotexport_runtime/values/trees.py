"""Nested inputs and outputs: flattening by a tree record, and rebuilding values from one. No torch at import."""

from __future__ import annotations

import collections
import dataclasses
import functools
import sys
from collections.abc import Callable, Iterable, Iterator
from threading import Lock
from typing import Any

import numpy as np

from aotexport_runtime.errors import BundleInvalid, NotSupported
from aotexport_runtime.schema.trees import (
    Bytes,
    Constant,
    EllipsisLiteral,
    Instance,
    Key,
    Leaf,
    Mapping,
    NamedFields,
    PythonValue,
    Range,
    Sequence,
    Tree,
)
from aotexport_runtime.schema.values import FloatArgument

SETS: dict[str, type[set[Any]] | type[frozenset[Any]]] = {"set": set, "frozenset": frozenset}
FACTORIES: dict[str, type] = {each.__name__: each for each in (list, dict, set, tuple, int, float, str, bool)}
"""Factories of a `defaultdict`'s missing values, by name."""


def leaves(tree: Tree, path: str = "") -> Iterator[tuple[str, Leaf | Constant]]:
    """Yield every leaf and constant of `tree` with its path (`x['ids'][0]`), in order."""
    if isinstance(tree, Leaf | Constant):
        yield path, tree
        return
    for step, item in zip(steps(tree), tree.items, strict=True):
        yield from leaves(item, path + step)


def arrays_in(trees: Iterable[Tree]) -> set[int]:
    """Return the indices of the leaves of `trees` that are arrays."""
    return {leaf.index for tree in trees for _, leaf in leaves(tree) if isinstance(leaf, Leaf) and leaf.array}


def steps(tree: Sequence | Mapping | NamedFields | Instance) -> list[str]:
    """Return the path step to each child: `[0]`, `['key']` or `.field`."""
    if isinstance(tree, Sequence):
        return [f"[{index}]" for index in range(len(tree.items))]
    if isinstance(tree, Mapping):
        return [f"[{key!r}]" for key in keys_of(tree)]
    return [f".{field}" for field in tree.fields]


def keys_of(tree: Mapping) -> list[Any]:
    """Return the keys of a dict, as Python has them."""
    return [key_of(key) for key in tree.keys]


def key_of(key: Key) -> Any:
    """Return a key of a dict, as Python has it."""
    if isinstance(key, tuple):
        return tuple(map(key_of, key))
    return python_value(key) if isinstance(key, Bytes) else key


def python_value(value: PythonValue) -> Any:
    """Return the Python value of a constant of the kinds that only trees have."""
    if isinstance(value, Bytes):
        return bytes.fromhex(value.hex)
    if isinstance(value, Range):
        return range(value.start, value.stop, value.step)
    if isinstance(value, EllipsisLiteral):
        return ...
    number = value.value
    return np.dtype(value.dtype).type(float(number.value) if isinstance(number, FloatArgument) else number)


class ModelOutput(collections.OrderedDict[str, Any]):
    """Named outputs, with access by key, attribute and position; entries that are None are left out.

    Replaces the output classes of model libraries, which a runtime without model code cannot import, by subclasses of
    the same names.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        return _model_output_of, (type(self).__name__, list(self.items()))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return self.get(name)

    def __getitem__(self, key: str | int | slice) -> Any:
        return super().__getitem__(key) if isinstance(key, str) else self.to_tuple()[key]

    def to_tuple(self) -> tuple[Any, ...]:
        """Return the values, in order."""
        return tuple(self.values())


Builder = Callable[[list[Any]], Any]


def builder(tree: Tree, constant: Callable[[Constant], Any]) -> Builder:
    """Return a function from the list of leaf values to the value that `tree` describes.

    Args:
        tree: a tree that `check_tree` accepted.
        constant: value of a constant leaf.
    """
    if isinstance(tree, Leaf):
        index = tree.index
        if tree.array:
            from aotexport_runtime.values import arrays

            return lambda values: arrays.array_of(values[index])
        return lambda values: values[index]
    if isinstance(tree, Constant):
        value = constant(tree)
        return lambda values: value
    items = [builder(item, constant) for item in tree.items]
    if isinstance(tree, Sequence):
        return _sequence_builder(tree, items)
    if isinstance(tree, Mapping):
        make, keys = _mapping_type(tree), keys_of(tree)
        return lambda values: make((key, item(values)) for key, item in zip(keys, items, strict=True))
    assert not isinstance(tree, Instance)
    make = _named_fields_type(tree)
    return lambda values: make([item(values) for item in items])


def _sequence_builder(tree: Sequence, items: list[Builder]) -> Builder:
    if tree.name is not None:
        class_ = _sequence_class(tree.name, list if tree.type == "list" else tuple)
        _register(class_, lambda sequence: (list(sequence), tuple(range(len(sequence)))), "SequenceKey")
        return lambda values: class_([item(values) for item in items])
    if tree.type == "list":
        return lambda values: [item(values) for item in items]
    if tree.type == "tuple":
        return lambda values: tuple([item(values) for item in items])
    if tree.type in SETS:
        type_ = SETS[tree.type]
        return lambda values: type_(item(values) for item in items)
    if tree.type == "deque":
        return lambda values: collections.deque([item(values) for item in items], tree.max_items)
    import torch

    return lambda values: torch.Size([item(values) for item in items])


def _mapping_type(tree: Mapping) -> Callable[[Iterable[tuple[Any, Any]]], Any]:
    if tree.type == "default_dict":
        factory = None if tree.factory is None else FACTORIES[tree.factory]
        return lambda items: collections.defaultdict(factory, items)
    if tree.type == "counter":
        return lambda items: collections.Counter(dict(items))
    return dict if tree.type == "dict" else collections.OrderedDict


def _named_fields_type(tree: NamedFields) -> Callable[[list[Any]], Any]:
    fields = list(tree.fields)
    if tree.type == "namedtuple":
        type_ = _named_tuple(tree.name, tree.fields)
        return lambda items: type_(*items)
    if tree.type == "return_type":
        import torch

        return_type = getattr(torch.return_types, tree.name, None)
        if not (isinstance(return_type, type) and issubclass(return_type, tuple)):
            raise NotSupported(f"this torch ({torch.__version__}) has no return type `{tree.name[:80]}`")
        if getattr(return_type, "n_fields", None) != len(fields):
            raise BundleInvalid(
                f"return type `{tree.name[:80]}` does not have {len(fields)} fields",
                check="structure-malformed/return-type",
            )
        return return_type
    if tree.type in ("dataclass", "object"):
        record = _dataclass(tree.name, tree.fields)
        _register(record, lambda found: ([getattr(found, name) for name in fields], tree.fields), "GetAttrKey")
        return lambda items: record(*items)
    output = _model_output(tree.name)
    _register(output, lambda mapping: (list(mapping.values()), tuple(mapping)), "MappingKey")
    return lambda items: output((field, item) for field, item in zip(fields, items, strict=True) if item is not None)


# --- classes, one per name and fields, so that results of two calls are of one type -----------------------


@functools.cache
def _sequence_class(name: str, base: type) -> Any:
    return type(name, (base,), {})


@functools.cache
def _model_output(name: str) -> type[ModelOutput]:
    return type(name, (ModelOutput,), {})


def _model_output_of(name: str, items: list[tuple[str, Any]]) -> ModelOutput:
    return _model_output(name)(items)


@functools.cache
def _named_tuple(name: str, fields: tuple[str, ...]) -> Any:
    return collections.namedtuple(name, fields)  # pyright: ignore[reportUntypedNamedTuple] (known from data)


@functools.cache
def _dataclass(name: str, fields: tuple[str, ...]) -> Any:
    return dataclasses.make_dataclass(name, fields)


# --- the same classes as nodes of torch's pytrees -----------------------------------------------------------

_REBUILD: dict[str, Callable[[Any, Iterable[Any], Any], Any]] = {
    "SequenceKey": lambda class_, items, _: class_(items),
    "GetAttrKey": lambda class_, items, _: class_(*items),
    "MappingKey": lambda class_, items, keys: class_(zip(keys, items, strict=True)),
}
_registered: set[type] = set()
_lock = Lock()


def _register(class_: type, flatten: Callable[[Any], tuple[list[Any], tuple[Any, ...]]], key: str) -> None:
    """Let torch see the items of a container; does nothing where torch is not imported.

    `DistributedDataParallel`, `torch.func` and others search results for tensors by `torch.utils._pytree`, to which an
    object of another class is a leaf. torch has no public name for the registration.

    Args:
        class_: of the container.
        flatten: returns its items and the step to each: attribute, position or key.
        key: name of torch's class of such steps.
    """
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
            rebuild = functools.partial(_REBUILD[key], class_)
            _pytree.register_pytree_node(class_, flatten, rebuild, flatten_with_keys_fn=flatten_with_keys)
            _registered.add(class_)
