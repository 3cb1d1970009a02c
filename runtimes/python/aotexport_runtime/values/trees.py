"""Nested inputs and outputs: flattening by a tree record, and rebuilding values from one. No torch at import."""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from aotexport_runtime.errors import BundleInvalid, NotSupported, Place
from aotexport_runtime.schema.bounded import INT64_MAX, is_identifier
from aotexport_runtime.schema.trees import Bytes, Constant, Instance, Key, Leaf, Mapping, NamedFields, Sequence, Tree
from aotexport_runtime.schema.values import SliceArgument
from aotexport_runtime.values.python_values import check_keys
from aotexport_runtime.values.pytrees import register_fields, register_items, register_mapping

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
    return bytes.fromhex(key.hex) if isinstance(key, Bytes) else key


def check_tree(tree: Tree, count: int, *, where: Place) -> None:
    """Refuse a tree whose leaves point outside `range(count)`, or whose containers are malformed.

    Raises:
        BundleInvalid: names the fault.
    """
    if isinstance(tree, Leaf):
        if not 0 <= tree.index < count:
            raise where.invalid(f"leaf {tree.index} of a tree is out of range", "index-range/leaf")
        return
    if isinstance(tree, Constant):
        return
    if isinstance(tree, Mapping):
        check_keys(tree.keys, where)
        _check_names(tree.keys, len(tree.items), where)
        if tree.factory is not None and tree.type != "default_dict":
            raise where.invalid(
                "a dict of a tree makes missing values, and is no `defaultdict`", "structure-malformed/factory"
            )
    elif isinstance(tree, Instance):
        _check_names(tree.fields, len(tree.items), where)
    elif isinstance(tree, Sequence):
        _check_sequence(tree, where)
    else:
        _check_names(tree.fields, len(tree.items), where)
        _check_identifier(tree.name, "__", where)
        for field in tree.fields:
            # Named tuples keep names with an underscore for themselves.
            _check_identifier(field, "_" if tree.type == "namedtuple" else "__", where)
    for item in tree.items:
        check_tree(item, count, where=where)


def _check_sequence(tree: Sequence, where: Place) -> None:
    if tree.type in SETS and not all(
        isinstance(item, Constant) and not isinstance(item.value, list | SliceArgument) for item in tree.items
    ):
        raise where.invalid("a set of a tree holds something else than plain constants", "structure-malformed/set")
    if tree.type == "size" and not all(
        isinstance(item, Leaf) or (isinstance(item, Constant) and _is_size(item.value)) for item in tree.items
    ):
        raise where.invalid("a size of a tree holds something else than integers", "structure-malformed/size")
    if tree.max_items is not None and (tree.type != "deque" or not len(tree.items) <= tree.max_items <= INT64_MAX):
        raise where.invalid(
            "a sequence of a tree has more items than it may keep, or is no deque", "structure-malformed/max-items"
        )
    if tree.name is not None:
        _check_identifier(tree.name, "__", where)
        if tree.type not in ("list", "tuple"):
            raise where.invalid(
                "a sequence of a tree is of a class of its own, and no list or tuple",
                "structure-malformed/sequence-name",
            )


def _is_size(value: Any) -> bool:
    return type(value) is int and abs(value) <= INT64_MAX


def _check_names(names: tuple[object, ...], items: int, where: Place) -> None:
    if len(names) != items:
        raise where.invalid(f"{len(names)} names for {items} items of a tree", "structure-malformed/names")
    if len(set(names)) != items:
        raise where.invalid("a tree has a name twice", "name-twice/tree")


def _check_identifier(name: str, reserved: str, where: Place) -> None:
    """Refuse a name that is no plain attribute: Python's named tuples and dataclasses generate code with it."""
    if not is_identifier(name) or name.startswith(reserved):
        raise where.invalid(f"the name {name[:80]!r} in a tree is no plain identifier", "name-malformed/tree-name")


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
        register_items(class_)
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
        register_fields(record, tree.fields)
        return lambda items: record(*items)
    output = _model_output(tree.name)
    register_mapping(output)
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
