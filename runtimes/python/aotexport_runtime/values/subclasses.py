"""Tensors of wrapper subclasses: taken apart into plain ones, and made again by classes that the caller of `load` gave.

A bundle could name a class whose construction runs code: nothing is imported, and classes are called with data alone.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from aotexport_runtime.errors import BundleInvalid, NotSupported
from aotexport_runtime.schema.graph import DTENSOR, Subclass
from aotexport_runtime.schema.trees import Constant, Instance
from aotexport_runtime.values import sizes
from aotexport_runtime.values.arguments import check_type
from aotexport_runtime.values.tensors import is_torch_tensor
from aotexport_runtime.values.trees import builder

if TYPE_CHECKING:
    import torch


def is_wrapper(value: Any) -> bool:
    """Return whether `value` is a tensor of a class that wraps other tensors."""
    type_ = type(value)
    return hasattr(type_, "__tensor_flatten__") and hasattr(type_, "__tensor_unflatten__") and is_torch_tensor(value)


def type_name(type_: type) -> str:
    """Return the name of a class in a bundle."""
    return f"{type_.__module__}:{type_.__qualname__}"


class _Protocol(NamedTuple):
    """How tensors of a class are taken apart into inner tensors by name, not copied, and a context, and made of them.

    `data` returns a context as bundles have it; `live` a context of such data, once per structure. Beside inner
    tensors, context, size and stride `unflatten` of some classes takes further options.
    """

    flatten: Callable[[Any], tuple[dict[str, torch.Tensor], Any]]
    unflatten: Callable[..., torch.Tensor]
    data: Callable[[Any], Any] = lambda context: context
    live: Callable[[Any], Any] = lambda data: data


def _protocol(type_: type) -> _Protocol:
    if type_name(type_) == DTENSOR:
        from aotexport_runtime.values import meshes

        return _Protocol(meshes.flatten, meshes.unflatten, meshes.data, meshes.live)
    return _Protocol(_flatten, type_.__tensor_unflatten__)


def _flatten(tensor: Any) -> tuple[dict[str, torch.Tensor], Any]:
    names, context = tensor.__tensor_flatten__()
    return {name: getattr(tensor, name) for name in names}, context


def flatten(tensor: torch.Tensor) -> tuple[dict[str, torch.Tensor], Any]:
    """Return the inner tensors of a wrapper by name, not copied, and its context as data."""
    make = _protocol(type(tensor))
    inner, context = make.flatten(tensor)
    return inner, make.data(context)


def with_inner(tensor: torch.Tensor, change: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """Return a wrapper like `tensor`, of its inner tensors as `change` returns them."""
    make = _protocol(type(tensor))
    inner, context = make.flatten(tensor)
    changed = {name: change(value) for name, value in inner.items()}
    return make.unflatten(changed, context, tensor.size(), tensor.stride())


def inner_tensors(tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the inner tensors of a wrapper by name, not copied; empty for a plain tensor."""
    return _protocol(type(tensor)).flatten(tensor)[0] if is_wrapper(tensor) else {}


def parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the plain tensors that `tensor` is made of, depth first; `[tensor]` for a plain one."""
    if not is_wrapper(tensor):
        return [tensor]
    return [part for inner in inner_tensors(tensor).values() for part in parts(inner)]


def inner_tensor(tensor: torch.Tensor, name: str) -> torch.Tensor:
    """Return the inner tensor `name` of a wrapper; an unknown name is refused (`BundleInvalid`)."""
    inner = inner_tensors(tensor)
    if name not in inner:
        message = f"a value of type `{type(tensor).__name__}` has no inner tensor {name[:80]!r}"
        raise BundleInvalid(message, check="structure-malformed/inner-tensor")
    return inner[name]


class TensorTypes:
    """Classes that the caller of `load` gave, by their names in bundles."""

    def __init__(self, types: Iterable[type] | Mapping[str, type] = ()) -> None:
        """Take classes under their own names, or by the names that a bundle has for them."""
        check_type("tensor_types", types, Iterable, "a list of classes")
        classes = types.values() if isinstance(types, Mapping) else (types := tuple(types))
        for class_ in classes:
            check_type("tensor_types", class_, type, "a list of classes")
        named = types.items() if isinstance(types, Mapping) else [(type_name(type_), type_) for type_ in types]
        self._types = dict(named)

    def missing(self, names: Iterable[str]) -> list[str]:
        """Return those of `names` that were not given."""
        return [name for name in names if name not in self._types]

    def get(self, name: str) -> type:
        """Return the class that a bundle calls `name`; one that was not given is refused (`NotSupported`)."""
        if name not in self._types:
            module = name.partition(":")[0]
            raise NotSupported(
                f"the bundle holds objects of the class `{name}`, which the caller did not give. Import it from "
                f"`{module}`, and pass it to `load` in `tensor_types`"
            )
        return self._types[name]


class Form:
    """The structure of a wrapper with its class and context: makes tensors, and compares them."""

    def __init__(self, record: Subclass, types: TensorTypes, constant: Callable[[Constant], Any]) -> None:
        """Prepare for a checked record; `constant` returns the value of a constant of its context.

        A class that is missing, is no wrapper here, or does not fit the context is refused (`NotSupported`).
        """
        self.type = types.get(record.type)
        if not hasattr(self.type, "__tensor_unflatten__"):
            raise NotSupported(f"`{record.type}` is here no class that wraps tensors (`__tensor_unflatten__`)")
        self._record = record
        self._protocol = _protocol(self.type)
        self._context = builder(record.context, constant, functools.partial(_instance, types))([])
        self._live = self._protocol.live(self._context)
        self._inner = [None if inner is None else Form(inner, types, constant) for inner in record.inner]

    def make(self, parts: Iterator[torch.Tensor], symbols: Mapping[str, int], *options: Any) -> torch.Tensor:
        """Return the tensor made of the next of `parts`, plain tensors depth first; its class takes `options`."""
        inner = {
            name: next(parts) if form is None else form.make(parts, symbols)
            for name, form in zip(self._record.attributes, self._inner, strict=True)
        }
        import torch

        shape = torch.Size(sizes.evaluate(size, symbols) for size in self._record.shape)
        stride = tuple(sizes.evaluate(step, symbols) for step in self._record.stride)
        return self._protocol.unflatten(inner, self._live, shape, stride, *options)

    def why_not(self, tensor: Any) -> str | None:
        """Return how `tensor` differs in structure (`expected ..., got ...`), or None when it does not."""
        if type(tensor) is not self.type:
            return f"expected a `{self.type.__name__}`, as at capture, got a `{type(tensor).__name__}`"
        inner, context = flatten(tensor)
        if tuple(inner) != self._record.attributes:
            expected, got = ", ".join(self._record.attributes), ", ".join(inner)
            return f"expected a `{self.type.__name__}` of the tensors {expected}, got one of {got}"
        if context is not self._context and context != self._context:
            name = self.type.__name__
            return f"expected a `{name}` with {_shown(self._context)}, as at capture, got one with {_shown(context)}"
        for (name, value), form in zip(inner.items(), self._inner, strict=True):
            if form is None and not is_wrapper(value):
                continue
            got = f"expected a plain tensor, as at capture, got a `{type(value).__name__}`"
            reason = got if form is None else form.why_not(value)
            if reason is not None:
                return f"inner tensor `{name}`: {reason}"
        return None


def _shown(context: Any) -> str:
    text = repr(context)
    return text if len(text) <= 200 else f"{text[:200]}..."


def _instance(types: TensorTypes, tree: Instance, items: list[Any]) -> Any:
    type_: Any = types.get(tree.type)
    fields = dict(zip(tree.fields, items, strict=True))
    if tree.form == "enum" and issubclass(type_, enum.Enum):
        (name,) = fields.values()
        if isinstance(name, str) and name in type_.__members__:
            return type_.__members__[name]
    elif tree.form == "namedtuple" and getattr(type_, "_fields", None) == tree.fields:
        return type_(**fields)
    elif tree.form == "dataclass" and dataclasses.is_dataclass(type_):
        known = {field.name: field.init for field in dataclasses.fields(type_)}
        if set(known) == set(fields):
            make: Any = type_
            made = make(**{name: value for name, value in fields.items() if known[name]})
            for name, value in fields.items():  # Also those that it makes itself.
                object.__setattr__(made, name, value)
            return made
    raise NotSupported(f"`{tree.type}` is here no {tree.form} with {', '.join(tree.fields)} as at capture")
