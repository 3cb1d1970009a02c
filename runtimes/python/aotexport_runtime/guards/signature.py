"""Binds and flattens a call's arguments to the list of tensors, and checks their structure.

The captured program is right only for arguments of the captured structure, so every container, key and constant is
compared. Arguments may be passed by position or by keyword, as the signature allows.
"""

from __future__ import annotations

import itertools
import math
from collections import UserDict, deque
from collections.abc import Callable, Collection, Iterable
from collections.abc import Mapping as MappingABC
from functools import partial
from typing import Any, NamedTuple

from aotexport_runtime.schema.program import ContainerChange, Parameter
from aotexport_runtime.schema.trees import Constant, Instance, Leaf, Mapping, NamedFields, Sequence, Tree
from aotexport_runtime.values.tensors import is_torch_tensor, size_type
from aotexport_runtime.values.trees import SETS, arrays_in, builder, key_of, keys_of, steps

_MISSING = object()
Report = Callable[[str], None]


class Bound(NamedTuple):
    """A call, bound to a program: an entry per input, a value per symbol, a sentence per violation of a guard.

    A call with violations does not fit. `containers` of the caller that the program changes are held by their path.
    """

    inputs: list[Any]
    symbols: dict[str, int]
    violations: list[str]
    containers: dict[str, Any]


class Signature:
    """The signature of a program, able to bind and flatten calls."""

    def __init__(
        self, parameters: tuple[Parameter, ...], constant: Callable[[Constant], Any], changed: Collection[str] = ()
    ) -> None:
        """Prepare; `constant` returns the value of a leaf, `changed` are paths of containers that calls change."""
        self._changed = changed
        self._parameters = parameters
        self._constant = constant
        self._positional = [p for p in parameters if p.kind in ("positional_only", "positional_or_keyword")]
        self._by_name = {p.name: p for p in parameters if p.kind in ("positional_or_keyword", "keyword_only")}
        self._var_positional = next((p for p in parameters if p.kind == "var_positional"), None)
        self._var_keyword = next((p for p in parameters if p.kind == "var_keyword"), None)
        # An argument that is left out has its default, all constants, as at capture.
        leading = list(itertools.takewhile(lambda p: isinstance(p.tree, Leaf), self._positional))
        self._arrays = arrays_in(parameter.tree for parameter in parameters)
        self.plain_leaves = None if (plain := self._plain(leading)) is None else list(plain.values())
        """Input per positional argument of a call that passes every required argument by position, each a distinct
        tensor or number; None: arguments are nested, or follow optional ones."""
        self.plain_keywords = self._plain([p for p in self._by_name.values() if isinstance(p.tree, Leaf)])
        """Input per name of a call that passes every required argument by name; None: arguments are nested."""

    def _plain(self, passed: list[Parameter]) -> dict[str, int] | None:
        """Return the input per parameter, if a call of these passes each tensor once and every required argument."""
        names = {p.name for p in passed}
        indices = {p.name: p.tree.index for p in passed if isinstance(p.tree, Leaf)}
        if self._arrays or len(set(indices.values())) < len(passed):
            return None
        if not all(p.optional or p.name in names for p in self._parameters):
            return None
        return indices

    def flatten(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], leaves: list[Any], changed: dict[str, Any] | None = None
    ) -> list[str]:
        """Put each leaf of the call into its place in `leaves`, and containers that it changes into `changed`, by path.

        Return one sentence per violation of the captured structure.
        """
        plain = self.plain_leaves
        if plain is not None and not kwargs and len(args) == len(plain):
            for index, value in zip(plain, args, strict=True):
                leaves[index] = value
            return []
        violations: list[str] = []
        places: dict[int, str] = {}

        def take(path: str, container: Any) -> None:
            """Record a container of the call; report one that is changed and stands elsewhere too."""
            if path in self._changed and changed is not None:
                changed[path] = container
            first = places.setdefault(id(container), path)
            if first != path and (first in self._changed or path in self._changed):
                violations.append(
                    f"`{path}`: expected another object than `{first}`, as at capture, since the call changes it"
                )

        for parameter, value in self._bind(args, kwargs, violations.append):
            if value is not _MISSING:
                self._flatten(parameter.tree, value, parameter.name, leaves, take, violations.append)
        return violations

    def _bind(self, args: tuple[Any, ...], kwargs: dict[str, Any], report: Report) -> list[tuple[Parameter, Any]]:
        """Return each parameter with the value that the call passes; `_MISSING`: it is left out."""
        rest = dict(kwargs)
        bound: list[tuple[Parameter, Any]] = list(zip(self._positional, args, strict=False))
        if len(args) > len(self._positional) and self._var_positional is None:
            report(f"takes {len(self._positional)} positional arguments ({_listed(self._positional)}), got {len(args)}")
        if self._var_positional is not None:
            bound.append((self._var_positional, args[len(self._positional) :]))
        by_keyword = (p for p in self._parameters if p.kind == "keyword_only")
        for parameter in (*self._positional[len(args) :], *by_keyword):
            is_named = parameter.name in self._by_name
            bound.append((parameter, rest.pop(parameter.name, _MISSING) if is_named else _MISSING))
        if self._var_keyword is not None:
            tree = self._var_keyword.tree
            order = tree.keys if isinstance(tree, Mapping) else ()
            is_ordered = isinstance(tree, Mapping) and not tree.any_order
            if is_ordered and [key for key in rest if key in order] != [key for key in order if key in rest]:
                report(f"keyword arguments {', '.join(map(str, order))}: expected in this order, as at capture")
            known = {key: rest.pop(key) for key in order if isinstance(key, str) and key in rest}
            bound.append((self._var_keyword, {**known, **rest}))
        else:
            for name in rest:
                unknown = f"unexpected keyword argument; there are {_listed(self._parameters)}"
                report(f"`{name}`: {'passed twice' if name in self._by_name else unknown}")
        for parameter, value in bound:
            if value is _MISSING and not parameter.optional:
                report(f"`{parameter.name}`: missing; it was passed at capture")
        return bound

    def _flatten(
        self, tree: Tree, value: Any, path: str, leaves: list[Any], take: Callable[[str, Any], None], report: Report
    ) -> None:
        if isinstance(tree, Leaf):
            if value is None:
                report(f"`{path}`: expected {'an array' if tree.array else 'a tensor or number'}, got None")
                return
            if tree.array:
                value = _tensor(value, leaves[tree.index], path, report)
            if leaves[tree.index] is not None and leaves[tree.index] is not value:
                report(f"`{path}`: at capture another argument was the very same tensor; pass the same one")
            leaves[tree.index] = value
        elif isinstance(tree, Constant):
            expected = self._constant(tree)
            if type(value) is not type(expected) or not _equal(value, expected):
                report(f"`{path}`: expected {expected!r}, as at capture, got {_describe(value)}")
        elif isinstance(tree, Sequence) and tree.type in SETS:
            expected = SETS[tree.type](self._constant(item) for item in tree.items if isinstance(item, Constant))
            if type(value) is not type(expected) or sorted(map(repr, value)) != sorted(map(repr, expected)):
                report(f"`{path}`: expected {expected!r}, as at capture, got {_describe(value)}")
            else:
                take(path, value)
        else:
            assert not isinstance(tree, Instance)
            items = _children(tree, value)
            if isinstance(items, str):
                report(f"`{path}`: {items}")
                return
            take(path, value)
            for step, child, item in zip(steps(tree), tree.items, items, strict=True):
                self._flatten(child, item, path + step, leaves, take, report)


def _tensor(array: Any, known: Any, path: str, report: Report) -> Any:
    """Return the tensor with the memory of an array: `known`, if it is one already; report a value that is no array."""
    from aotexport_runtime.values.arrays import known_array, tensor_of, why_not

    if (reason := why_not(array)) is not None:
        report(f"`{path}`: expected an array, as at capture; {_describe(array)} {reason}")
        return known
    return known if known is not None and known_array(known) is array else tensor_of(array)


def _equal(value: Any, expected: Any) -> bool:
    """Return whether two constants are equal: zeros by their sign, NaN to NaN, complex by parts, CPUs of any index."""
    if isinstance(expected, complex):
        return _equal(value.real, expected.real) and _equal(value.imag, expected.imag)
    if getattr(value, "type", "") == getattr(expected, "type", "") == "cpu":
        return True
    if isinstance(value, float) and isinstance(expected, float) and not value and not expected:
        return math.copysign(1, value) == math.copysign(1, expected)
    return bool(value == expected or (value != value and expected != expected))


def _children(tree: Sequence | Mapping | NamedFields, value: Any) -> list[Any] | str:
    """Return the children of `value` in the order of `tree`, or the fault of its structure in words."""
    if isinstance(tree, Sequence):
        type_: Any = {"tuple": tuple, "list": list, "size": size_type(), "deque": deque}[tree.type]
        fits = type(value) is type_
        if tree.name is not None:
            is_named = isinstance(value, type_) and type(value).__name__ == tree.name
            fits = is_named and not getattr(value, "__dict__", None)
        if not fits or len(value) != len(tree.items):
            return f"expected a {tree.name or tree.type} of {len(tree.items)}, got {_describe(value)}"
        if tree.type == "deque" and value.maxlen != tree.max_items:
            return f"expected a deque with maxlen={tree.max_items}, as at capture, got maxlen={value.maxlen}"
        return list(value)
    if isinstance(tree, Mapping):
        return _values(tree, value)
    return _fields(tree, value)


def _values(tree: Mapping, value: Any) -> list[Any] | str:
    """Return the values of a dict in the order of the tree's keys, or the fault of its keys in words."""
    keys = keys_of(tree)
    expected = f"expected a dict with keys {keys} in {'any' if tree.any_order else 'this'} order"
    if not isinstance(value, dict | UserDict):
        return f"{expected}, got {_describe(value)}"
    missing = [repr(key) for key in keys if key not in value]
    unexpected = [repr(key) for key in value if key not in keys]
    if missing or unexpected:
        wrong = [f"missing: {', '.join(missing)}"] if missing else []
        wrong += [f"unexpected: {', '.join(unexpected)}"] if unexpected else []
        return f"{expected}; {'; '.join(wrong)}"[:400]
    own = list(value)
    # 1 and 1.0 are one key of a dict, but different operands.
    if {key: _floats(key) for key in own} != {key: _floats(key) for key in keys} or (
        not tree.any_order and own != keys
    ):
        return f"{expected}, got {_describe(value)}"
    return [value[key] for key in keys]


def _floats(key: Any) -> Any:
    return tuple(map(_floats, key)) if isinstance(key, tuple) else isinstance(key, float)


def _fields(tree: NamedFields, value: Any) -> list[Any] | str:
    get = value.get if isinstance(value, MappingABC) else partial(getattr, value)
    items = [get(name, _MISSING) for name in tree.fields]
    other = tree.type == "object" and type(value).__name__ != tree.name
    if other or any(item is _MISSING for item in items) or is_torch_tensor(value):
        return f"expected a `{tree.name}` with fields {', '.join(tree.fields)}, got {_describe(value)}"
    return items


def _describe(value: Any) -> str:
    if is_torch_tensor(value):
        return f"a tensor {str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    if isinstance(value, dict | UserDict):
        return f"a dict with keys {list(value)}"[:120]
    if isinstance(value, list | tuple | deque):
        return f"a {type(value).__name__} of {len(value)}"
    return repr(value)[:80]


def _listed(parameters: Iterable[Parameter]) -> str:
    return ", ".join(f"`{parameter.name}`" for parameter in parameters) or "none"


# --- lists, dicts, sets and objects of the caller, which calls change ---------------------------------------


def container_changes(
    changes: Iterable[ContainerChange], constant: Callable[[Constant], Any]
) -> Callable[[dict[str, Any], Iterable[Any]], None]:
    """Return a function that changes the containers of a call, by path, given the outputs of the program's graph.

    `constant` returns the value of a constant leaf.
    """
    prepared: list[Any] = [
        (each.path, [*map(key_of, each.keys)], [item and builder(item, constant) for item in each.items])
        for each in changes
    ]

    def apply(containers: dict[str, Any], outputs: Iterable[Any]) -> None:
        values = list(outputs) if prepared else []
        for path, keys, builders in prepared:
            items = [(key, build and build(values), build is None) for key, build in zip(keys, builders, strict=True)]
            _fill(containers[path], items)

    return apply


def _fill(container: Any, items: list[tuple[Any, Any, bool]]) -> None:
    """Give a container new items: each with its key, its value, and whether the old value stays."""
    if isinstance(container, set):
        container.clear()
        container.update(value for _, value, _ in items)
    elif isinstance(container, list | dict | UserDict | deque):
        after = [(key, container[key] if stays else value) for key, value, stays in items]
        container.clear()
        if isinstance(container, list | deque):
            container.extend(value for _, value in after)
        else:
            # `Counter.update` would add to the old counts.
            dict.update(container, after) if isinstance(container, dict) else container.update(after)
    else:
        for key, value, stays in items:
            if not stays:
                setattr(container, key, value)
