"""Nested inputs and outputs: flattening by a tree record, and rebuilding values from one. No torch at import."""

from __future__ import annotations

import collections
import dataclasses
import functools
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

from aotexport_runtime.errors import BundleInvalid, NotSupported
from aotexport_runtime.schema import trees
from aotexport_runtime.schema.values import FloatArgument

SETS: dict[str, type[set[Any]] | type[frozenset[Any]]] = {"set": set, "frozenset": frozenset}
FACTORIES: dict[str, type] = {each.__name__: each for each in (list, dict, set, tuple, int, float, str, bool)}
"""Factories of a `defaultdict`'s missing values, by name."""


def leaves(tree: trees.Tree, path: str = "") -> Iterator[tuple[str, trees.Leaf | trees.Constant]]:
    """Yield every leaf and constant of `tree` with its path (`x['ids'][0]`), in order."""
    if isinstance(tree, trees.Leaf | trees.Constant):
        yield path, tree
        return
    for step, item in zip(steps(tree), tree.items, strict=True):
        yield from leaves(item, path + step)


def arrays_in(found: Iterable[trees.Tree]) -> set[int]:
    """Return the indices of the leaves of trees that are arrays."""
    return {leaf.index for tree in found for _, leaf in leaves(tree) if isinstance(leaf, trees.Leaf) and leaf.array}


def steps(tree: trees.Sequence | trees.Mapping | trees.NamedFields | trees.Instance) -> list[str]:
    """Return the path step to each child: `[0]`, `['key']` or `.field`."""
    if isinstance(tree, trees.Sequence):
        return [f"[{index}]" for index in range(len(tree.items))]
    if isinstance(tree, trees.Mapping):
        return [f"[{key!r}]" for key in keys_of(tree)]
    return [f".{field}" for field in tree.fields]


def keys_of(tree: trees.Mapping) -> list[Any]:
    """Return the keys of a dict, as Python has them."""
    return [key_of(key) for key in tree.keys]


def key_of(key: trees.Key) -> Any:
    """Return a key of a dict, as Python has it."""
    if isinstance(key, tuple):
        return tuple(map(key_of, key))
    return python_value(key) if isinstance(key, trees.Bytes) else key


def python_value(value: trees.PythonValue) -> Any:
    """Return the Python value of a constant of the kinds that only trees have."""
    if isinstance(value, trees.Bytes):
        return bytes.fromhex(value.hex)
    if isinstance(value, trees.Range):
        return range(value.start, value.stop, value.step)
    if isinstance(value, trees.EllipsisLiteral):
        return ...
    number = value.value
    return np.dtype(value.dtype).type(float(number.value) if isinstance(number, FloatArgument) else number)


class ModelOutput(collections.OrderedDict[str, Any]):
    """Named outputs, with access by key, attribute and position; entries that are None are left out.

    Subclasses of the same names replace the output classes of model libraries, which a runtime cannot import.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        return _model_output, (type(self).__name__, list(self.items()))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return self.get(name)

    def __getitem__(self, key: str | int | slice) -> Any:
        return super().__getitem__(key) if isinstance(key, str) else self.to_tuple()[key]

    def to_tuple(self) -> tuple[Any, ...]:
        """Return the values, in order."""
        return tuple(self.values())


def _model_output(name: str, items: list[tuple[str, Any]]) -> ModelOutput:
    return _class("model_output", name, (), "torch" in sys.modules)(items)


Builder = Callable[[list[Any]], Any]


def builder(
    tree: trees.Tree,
    constant: Callable[[trees.Constant], Any],
    instance: Callable[[trees.Instance, list[Any]], Any] | None = None,
) -> Builder:
    """Return a function from the list of leaf values to the value that `tree` describes.

    Args:
        tree: a tree that `check_tree` accepted.
        constant: value of a constant leaf.
        instance: of a context: the object of a class of the caller's, of its items.
    """
    if isinstance(tree, trees.Leaf):
        index = tree.index
        if tree.array:
            from aotexport_runtime.values import arrays

            return lambda values: arrays.array_of(values[index])
        return lambda values: values[index]
    if isinstance(tree, trees.Constant):
        value = constant(tree)
        return lambda values: value
    items = [builder(item, constant, instance) for item in tree.items]
    make = functools.partial(instance, tree) if instance and isinstance(tree, trees.Instance) else _maker(tree)
    return lambda values: make([item(values) for item in items])


def _maker(tree: trees.Sequence | trees.Mapping | trees.NamedFields | trees.Instance) -> Callable[[list[Any]], Any]:
    with_torch = "torch" in sys.modules
    if isinstance(tree, trees.Mapping):
        makers: dict[str, Callable[[Any], Any]] = {
            "dict": dict,
            "ordered_dict": collections.OrderedDict,
            "default_dict": functools.partial(collections.defaultdict, tree.factory and FACTORIES[tree.factory]),
            "counter": lambda pairs: collections.Counter(dict(pairs)),
        }
        make, keys = makers[tree.type], keys_of(tree)
        return lambda items: make(zip(keys, items, strict=True))
    if isinstance(tree, trees.Sequence):
        if tree.name is not None:
            return _class(tree.type, tree.name, (), with_torch)
        if tree.type == "size":
            import torch

            return torch.Size
        if tree.type == "deque":
            return functools.partial(collections.deque[Any], maxlen=tree.max_items)
        return {"list": list, "tuple": tuple, **SETS}[tree.type]
    assert isinstance(tree, trees.NamedFields)
    if tree.type == "return_type":
        return _return_type(tree.name, len(tree.fields))
    is_output, fields = tree.type == "model_output", tree.fields
    class_ = _class(tree.type, tree.name, () if is_output else fields, with_torch)
    if is_output:
        return lambda items: class_(pair for pair in zip(fields, items, strict=True) if pair[1] is not None)
    return lambda items: class_(*items)


def _return_type(name: str, count: int) -> Callable[[list[Any]], Any]:
    import torch

    found = getattr(torch.return_types, name, None)
    if not (isinstance(found, type) and issubclass(found, tuple)):
        raise NotSupported(f"this torch ({torch.__version__}) has no return type `{name[:80]}`")
    if getattr(found, "n_fields", None) != count:
        message = f"return type `{name[:80]}` does not have {count} fields"
        raise BundleInvalid(message, check="structure-malformed/return-type")
    return found


@functools.cache
def _class(kind: str, name: str, fields: tuple[str, ...], with_torch: bool) -> Any:
    """Return a class, one per name and fields: results of two calls are of one type. With torch it is a pytree node.

    `DistributedDataParallel` and others search pytrees for tensors. torch has no public name for the registration.
    """
    if kind == "namedtuple":
        return collections.namedtuple(name, fields)
    if kind in _BASES:
        class_: Any = type(name, (_BASES[kind],), {})
    else:
        class_ = dataclasses.make_dataclass(name, fields)
    # ONNX Runtime runs bundles without torch.
    if with_torch:
        from torch.utils import _pytree

        flatten, rebuild, key = _NODES[{"tuple": "list", "object": "dataclass"}.get(kind, kind)]
        make_key = getattr(_pytree, key)

        def flatten_with_keys(container: Any) -> tuple[list[tuple[Any, Any]], tuple[Any, ...]]:
            items, steps = flatten(container)
            return list(zip(map(make_key, steps), items, strict=True)), steps

        # Torch's other implementation, `torch.utils._cxx_pytree`, copies the registration when it is imported.
        made = functools.partial(rebuild, class_)
        _pytree.register_pytree_node(class_, flatten, made, flatten_with_keys_fn=flatten_with_keys)
    return class_


_BASES: dict[str, type] = {"list": list, "tuple": tuple, "model_output": ModelOutput}
_Flatten = Callable[[Any], tuple[list[Any], tuple[Any, ...]]]
_NODES: dict[str, tuple[_Flatten, Callable[[Any, Iterable[Any], Any], Any], str]] = {
    "list": (
        lambda found: (list(found), tuple(range(len(found)))),
        lambda class_, items, _: class_(items),
        "SequenceKey",
    ),
    "model_output": (
        lambda output: (list(output.values()), tuple(output)),
        lambda class_, items, keys: class_(zip(keys, items, strict=True)),
        "MappingKey",
    ),
    "dataclass": (
        lambda record: ([getattr(record, name) for name in record.__match_args__], record.__match_args__),
        lambda class_, items, _: class_(*items),
        "GetAttrKey",
    ),
}
"""Per kind of container: its items and the step to each; the container of them; torch's class of steps."""
