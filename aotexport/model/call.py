"""The example call, with its arguments as flat leaves: each tensor object once, a dynamic integer once per place."""

from __future__ import annotations

import collections
import copy
import dataclasses
import enum
import inspect
from collections.abc import Callable, Iterable
from collections.abc import Mapping as MappingABC
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import torch
from torch import nn

from aotexport.errors import ExportFailed, ModelFileInvalid
from aotexport.model.array_proxies import as_argument
from aotexport.model.structure import flattened, tree_of
from aotexport.model.tensor_kinds import why_not_held
from aotexport.torch_internals.applications import called_by_class
from aotexport.torch_internals.calls import is_dimension, is_fixed_dimension
from aotexport_runtime.schema.program import Parameter
from aotexport_runtime.schema.trees import Constant, Leaf, Mapping, NamedFields, Sequence, Tree
from aotexport_runtime.values.arrays import tensor_of, why_not
from aotexport_runtime.values.structure import encode_constant, is_constant
from aotexport_runtime.values.trees import arrays_in, keys_of, leaves, steps

Attribute = tuple[nn.Module, str, Any]
"""A module, the name of an attribute of it, and a value."""
BY_KEYWORD = ("positional_or_keyword", "keyword_only")
"""Kinds of parameters that take keyword arguments; a keyword may equal the name of any other one, in `**kwargs`."""


@dataclass
class ExampleCall:
    """A callable (an `nn.Module`, or a function of tensors) with one call of it.

    Attributes:
        parameters: its signature; leaves of the trees index `tensors`.
        tensors: argument tensors and dynamic integers, each tensor object once; arrays as tensors of the same memory.
        paths: place of each of them in the call, the first one.
        axes: per tensor, the user's dynamic dimension per axis; per integer, its dimension as that of axis 0.
        first_call_constants: attributes that the first call sets for good; see `add_first_call_constants`.
        dynamic_shapes: the user's dynamic dimensions, by the name of the argument.
    """

    callable: nn.Module | Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    parameters: tuple[Parameter, ...] = ()
    tensors: list[Any] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    axes: list[dict[int, Any] | None] = field(default_factory=list)
    first_call_constants: list[Attribute] = field(default_factory=list)
    dynamic_shapes: dict[str, Any] = field(default_factory=dict)

    @property
    def module(self) -> nn.Module | None:
        """The module, also of a method of one; None for a function."""
        owner = self.callable if isinstance(self.callable, nn.Module) else getattr(self.callable, "__self__", None)
        return owner if isinstance(owner, nn.Module) else None

    @property
    def name(self) -> str:
        """Name of the class, method or function."""
        if isinstance(self.callable, nn.Module):
            return type(self.callable).__name__
        return getattr(self.callable, "__name__", type(self.callable).__name__)

    @property
    def arrays(self) -> set[int]:
        """Indices of the arrays of NumPy among its tensors."""
        return arrays_in(parameter.tree for parameter in self.parameters)

    def trees(self) -> dict[str, Tree]:
        """Return the trees of the arguments by name; keywords of `**kwargs` have their own names."""
        found = {parameter.name: parameter.tree for parameter in self.parameters}
        for parameter in self.parameters:
            if isinstance(parameter.tree, Mapping) and parameter.kind == "var_keyword":
                found |= zip(map(str, parameter.tree.keys), parameter.tree.items, strict=True)
        return found

    def rebuild(self, tensors: list[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return `(args, kwargs)` with `tensors` in place of the example's, everything else as in the example."""
        trees = self.trees()
        positional = [p.tree for p in self.parameters if p.kind in ("positional_only", "positional_or_keyword")]
        arrays = self.arrays
        tensors = [as_argument(leaf) if index in arrays else leaf for index, leaf in enumerate(tensors)]
        for parameter in self.parameters:
            if isinstance(parameter.tree, Sequence) and parameter.kind == "var_positional":
                positional += parameter.tree.items
        args = tuple(_swap(arg, tree, tensors) for arg, tree in zip(self.args, positional, strict=False))
        return args, {key: _swap(arg, trees[key], tensors) for key, arg in self.kwargs.items()}


def example_call(
    callable_: nn.Module | Callable[..., Any],
    args: Iterable[Any],
    kwargs: dict[str, Any] | None,
    dynamic_shapes: Any,
    *,
    shared: MappingABC[str, Any] | None = None,
) -> ExampleCall:
    """Return the example call, bound to the callable's signature and flattened.

    `dynamic_shapes` is as `torch.export.export` takes it: by parameter name or position, nested like the arguments.
    `shared` has sizes by the name of the argument, for the passed arguments of a call without `dynamic_shapes`.

    Raises:
        ModelFileInvalid: the arguments do not fit the signature, `dynamic_shapes` does not fit the arguments, or the
            call passes none of the arguments that have dynamic sizes in `shared`.
        ExportFailed: an argument that a bundle cannot hold.
    """
    if isinstance(callable_, type) or not callable(callable_):
        is_class = isinstance(callable_, type)
        got = f"the class `{callable_.__name__}`: pass an instance" if is_class else type(callable_).__name__
        raise ModelFileInvalid(f"what to export must be a module or a function of tensors, got {got}")
    if not isinstance(args, tuple | list):
        raise ModelFileInvalid(f"example arguments must be a tuple, got {type(args).__name__}; write `(x,)` for one")
    call = ExampleCall(called_by_class(callable_), tuple(args), dict(kwargs or {}))
    signature = signature_of(callable_)
    try:
        bound = signature.bind(*call.args, **call.kwargs)
    except TypeError as error:
        raise ModelFileInvalid(f"the example inputs do not fit `{call.name}{signature}`: {error}") from None
    indices: dict[int, int] = {}

    def leaf_index(value: Any, path: str) -> int | None:
        key = id(value) if isinstance(value, torch.Tensor | np.ndarray) else -1 - len(call.tensors)
        if key not in indices:
            reason = why_not_held(value) if isinstance(value, torch.Tensor) else None
            if isinstance(value, np.ndarray):
                reason = why_not(value)
            if reason is not None:
                raise ExportFailed(f"`{path}` {reason}")
            indices[key] = len(call.tensors)
            call.tensors.append(tensor_of(value) if isinstance(value, np.ndarray) else value)
            call.paths.append(path)
            call.axes.append(None)
        return indices[key]

    call.parameters = tuple(
        _parameter(parameter, bound.arguments, leaf_index) for parameter in signature.parameters.values()
    )
    if dynamic_shapes is None and shared:
        dynamic_shapes = _of_passed(call, shared)
    if dynamic_shapes is not None:
        _spread(call, dynamic_shapes)
    _fix_integers(call, set(bound.arguments))
    return call


def _fix_integers(call: ExampleCall, passed: set[str]) -> None:
    inputs = [i for i, leaf in enumerate(call.tensors) if isinstance(leaf, torch.Tensor) or call.axes[i] is not None]
    positions = {old: new for new, old in enumerate(inputs)}

    def fixed(leaf: Leaf) -> Tree:
        if leaf.index not in positions:
            return Constant(value=values[leaf.index])
        return msgspec.structs.replace(leaf, index=positions[leaf.index])

    values = call.tensors
    call.tensors = [values[index] for index in inputs]
    call.paths = [call.paths[index] for index in inputs]
    call.axes = [call.axes[index] for index in inputs]
    parameters: list[Parameter] = []
    for parameter in call.parameters:
        tree = with_leaves(parameter.tree, fixed)
        is_dynamic = any(isinstance(leaf, Leaf) for _, leaf in leaves(tree))
        if is_dynamic and parameter.name not in passed:
            raise ModelFileInvalid(f"`{parameter.name}` is dynamic; pass it in the example call")
        optional = parameter.optional and not is_dynamic
        default = None if optional else parameter.default
        parameters.append(msgspec.structs.replace(parameter, tree=tree, optional=optional, default=default))
    call.parameters = tuple(parameters)


def with_leaves(tree: Tree, changed: Callable[[Leaf], Tree]) -> Tree:
    """Return a tree with what `changed` returns in the place of each leaf."""
    if isinstance(tree, Leaf | Constant):
        return changed(tree) if isinstance(tree, Leaf) else tree
    return msgspec.structs.replace(tree, items=tuple(with_leaves(item, changed) for item in tree.items))


def signature_of(callable_: Any) -> inspect.Signature:
    """Return the signature of a function, or of a module's `forward`; `(*args, **kwargs)` if it has none."""
    target = callable_.forward if isinstance(callable_, nn.Module) else callable_
    try:
        return inspect.signature(target)
    except (ValueError, TypeError):
        return inspect.signature(lambda *args, **kwargs: None)


def _parameter(parameter: inspect.Parameter, arguments: dict[str, Any], leaf_index: Any) -> Parameter:
    kind: Any = parameter.kind.name.lower()
    empty: Any = {"var_positional": (), "var_keyword": {}}.get(kind, parameter.default)
    passed = parameter.name in arguments
    value = arguments[parameter.name] if passed else empty
    if not passed and not _is_plain(value):
        # A constant of the programs, which calls cannot pass.
        return Parameter(name=parameter.name, kind=kind, tree=Constant(value=None), optional=True)
    tree = tree_of(value, parameter.name, leaf_index, role="input")
    same = value is empty or (type(value) is type(empty) and isinstance(value, int | float | str) and value == empty)
    default_stands_in = empty is not inspect.Parameter.empty and (not passed or same)
    default = Constant(value=encode_constant(parameter.default)) if is_constant(parameter.default) else None
    return Parameter(name=parameter.name, kind=kind, tree=tree, optional=default_stands_in, default=default)


def _is_plain(value: Any) -> bool:
    """Return whether a default is made of constants alone."""
    try:
        return not flattened(value, "", role="input")[1]
    except ExportFailed:
        return False


def _of_passed(call: ExampleCall, shared: MappingABC[str, Any]) -> dict[str, Any]:
    """Return the sizes in `shared` of the arguments for which the call passes tensors or integers."""
    passed = [name for name, tree in call.trees().items() if any(isinstance(leaf, Leaf) for _, leaf in leaves(tree))]
    found = {name: spec for name, spec in shared.items() if name in passed}
    dynamic = [name for name, spec in shared.items() if _is_dynamic(spec)]
    if dynamic and not any(name in found for name in dynamic):
        raise ModelFileInvalid(
            f"dynamic_shapes of the export are for {', '.join(f'`{name}`' for name in dynamic)}, and this example "
            f"passes {', '.join(f'`{name}`' for name in passed) or 'no tensors'}"
        )
    return found


def _is_dynamic(spec: Any) -> bool:
    return any(map(_is_dynamic, _items(spec))) if isinstance(spec, dict | tuple | list) else is_dimension(spec)


def sizes_by_name(names: list[str], dynamic_shapes: Any) -> dict[str, Any]:
    """Return the entries of `dynamic_shapes`, as `torch.export.export` takes it, by parameter.

    `ModelFileInvalid`: it is no dict or tuple, or has more entries than there are parameters.
    """
    if isinstance(dynamic_shapes, dict):
        return dict(dynamic_shapes)
    if not isinstance(dynamic_shapes, tuple | list):
        raise ModelFileInvalid(f"dynamic_shapes must be a dict or tuple, got {type(dynamic_shapes).__name__}")
    if len(dynamic_shapes) > len(names):
        raise ModelFileInvalid(
            f"dynamic_shapes has {len(dynamic_shapes)} entries; the parameters are {', '.join(names) or 'none'}. "
            "A parameter like `*args` takes one entry, a tuple with one item per argument"
        )
    return dict(zip(names, dynamic_shapes, strict=False))


def _spread(call: ExampleCall, dynamic_shapes: Any) -> None:
    names = [parameter.name for parameter in call.parameters]
    by_name = call.dynamic_shapes = sizes_by_name(names, dynamic_shapes)
    trees = call.trees()
    for name, spec in by_name.items():
        if name not in trees:
            raise ModelFileInvalid(f"dynamic_shapes names `{name}`; the parameters are {', '.join(names)}")
        _spread_tree(call, trees[name], spec, name)


def _spread_tree(call: ExampleCall, tree: Tree, spec: Any, path: str) -> None:
    if spec is None:
        return
    if isinstance(tree, Constant):
        nested = isinstance(spec, dict | tuple | list) and any(item is not None for item in _items(spec))
        if nested or is_dimension(spec):
            raise ModelFileInvalid(f"dynamic_shapes: `{path}` is neither tensor nor integer in the example call")
        return
    if isinstance(tree, Leaf):
        leaf = call.tensors[tree.index]
        call.axes[tree.index] = _axes(spec, leaf, path) if isinstance(leaf, torch.Tensor) else _of_integer(spec, path)
        return
    for step, item, child in zip(steps(tree), tree.items, _child_specs(tree, spec, path), strict=True):
        _spread_tree(call, item, child, path + step)


def _items(spec: Any) -> list[Any]:
    return list(spec.values()) if isinstance(spec, dict) else list(spec)


def _child_specs(tree: Tree, spec: Any, path: str) -> list[Any]:
    if isinstance(spec, dict):
        keys = keys_of(tree) if isinstance(tree, Mapping) else tree.fields if isinstance(tree, NamedFields) else ()
        unknown = [key for key in spec if key not in keys]
        if unknown:
            raise ModelFileInvalid(f"dynamic_shapes: `{path}` has no {unknown[0]!r}")
        return [spec.get(key) for key in keys]
    assert isinstance(tree, Sequence | Mapping | NamedFields)
    if isinstance(spec, tuple | list) and len(spec) == len(tree.items):
        return list(spec)
    raise ModelFileInvalid(f"dynamic_shapes: `{path}` has {len(tree.items)} items; give one entry each, or None")


def _axes(spec: Any, tensor: torch.Tensor, path: str) -> dict[int, Any]:
    axes = dict(enumerate(spec)) if isinstance(spec, tuple | list) else spec
    if not isinstance(axes, dict):
        raise ModelFileInvalid(f"dynamic_shapes: `{path}` needs a dict from axis to dimension, got {spec!r}")
    result: dict[int, Any] = {}
    for axis, dimension in axes.items():
        if type(axis) is not int:
            raise ModelFileInvalid(f"dynamic_shapes: `{path}` needs a dict from axis, a number, got {axis!r}")
        if not -tensor.dim() <= axis < tensor.dim():
            raise ModelFileInvalid(f"dynamic_shapes: `{path}` has {tensor.dim()} axes, no axis {axis}")
        size = tensor.shape[axis]
        if not is_dimension(dimension) and not is_fixed_dimension(dimension):
            raise ModelFileInvalid(
                f'dynamic_shapes: axis {axis} of `{path}` needs a dimension, `torch.export.Dim("name")`, '
                f"got {dimension!r}"
            )
        if isinstance(dimension, int) and dimension != size:
            raise ModelFileInvalid(
                f"dynamic_shapes: axis {axis} of `{path}` is fixed to {dimension}; it is {size} in the example inputs"
            )
        result[axis % tensor.dim()] = dimension
    return result


def _of_integer(spec: Any, path: str) -> dict[int, Any] | None:
    """Return the dimension of an integer as that of axis 0; None: it is fixed."""
    if is_fixed_dimension(spec):
        return None
    if not is_dimension(spec):
        raise ModelFileInvalid(f"dynamic_shapes: `{path}` is an integer and needs a dimension, got {spec!r}")
    return {0: spec}


def _swap(value: Any, tree: Tree, leaves: list[Any]) -> Any:
    """Return `value`, whose tree is `tree`, with its leaves replaced by `leaves`."""
    if isinstance(tree, Leaf):
        return leaves[tree.index]
    if isinstance(tree, Constant) or isinstance(value, torch.Size | enum.Enum | frozenset):
        return value
    if isinstance(value, set):
        return set(value)
    if isinstance(value, dict | collections.UserDict):
        items = zip(value.items(), tree.items, strict=True)
        swapped = {key: _swap(item, child, leaves) for (key, item), child in items}
        if dataclasses.is_dataclass(value):
            return type(value)(swapped)
        copied = copy.copy(value)
        # Item by item: `Counter.update` would add to the values.
        for key, item in swapped.items():
            copied[key] = item
        return copied
    if isinstance(value, collections.deque):
        return collections.deque(
            [_swap(item, child, leaves) for item, child in zip(value, tree.items, strict=True)], value.maxlen
        )
    if isinstance(value, tuple | list):
        items = [_swap(item, child, leaves) for item, child in zip(value, tree.items, strict=True)]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    assert isinstance(tree, NamedFields)
    # Copied without `__init__`, which may compute fields of others.
    copied = copy.copy(value)
    for name, child in zip(tree.fields, tree.items, strict=True):
        object.__setattr__(copied, name, _swap(getattr(value, name), child, leaves))
    return copied
