"""Places in what golden calls pass and get: paths, containers that differ, results in words."""

import ast
import collections
import dataclasses
import re
from collections.abc import Iterator
from typing import Any

import numpy
import torch


def put(value: Any, steps: list[str], new: Any) -> Any:
    """Return `value` with `new` at the place that steps of a path lead to."""
    if not steps:
        return new
    step, *rest = steps
    if step.startswith(".") and isinstance(value, tuple):
        return value._replace(**{step[1:]: put(getattr(value, step[1:]), rest, new)})
    if step.startswith("."):
        setattr(value, step[1:], put(getattr(value, step[1:]), rest, new))
        return value
    key = ast.literal_eval(step[1:-1])
    if isinstance(value, tuple):
        return (*value[:key], put(value[key], rest, new), *value[key + 1 :])
    value[key] = put(value[key], rest, new)
    return value


def changed(value: Any, how: dict[str, Any]) -> Any:
    """Return a container that differs as `calls/README.md` says."""
    if "reversed" in how:
        return type(value)(reversed(value.items()))
    if "max_items" in how:
        return collections.deque(value, how["max_items"])
    if "more" in how:
        return type(value)([*value, how["more"]])
    if "keys" in how:
        keys = (tuple(key) if isinstance(key, list) else key for key in how["keys"])
        return type(value)(zip(keys, value.values(), strict=True))
    if "items" in how:
        return type(value)(how["items"])
    if "list" in how:
        return list(value)
    if "tensor" in how:
        return torch.from_numpy(value)
    made = type(how["class"], (), {})()
    vars(made).update(vars(value))
    return made


def place(named: dict[str, Any], values: dict[str, Any], changes: dict[str, Any]) -> None:
    """Put values at their paths into what is passed by the names of parameters, and change containers."""
    for path, value in values.items():
        name, *steps = steps_of(path)
        is_array = name in named and isinstance(found_at(named, path), numpy.ndarray)
        named[name] = put(named.get(name), steps, value.numpy() if is_array else value)
    for path, how in changes.items():
        name, *steps = steps_of(path)
        if "absent" in how:
            del named[name]
        else:
            new = found_at(named, how["is"]) if "is" in how else changed(found_at(named, path), how)
            named[name] = put(named[name], steps, new)


def found_at(named: dict[str, Any], path: str) -> Any:
    """Return what stands at a path."""
    name, *steps = steps_of(path)
    value = named[name]
    for step in steps:
        value = getattr(value, step[1:]) if step.startswith(".") else value[ast.literal_eval(step[1:-1])]
    return value


def described(value: Any, known: dict[int, str]) -> str:
    """Return a value in words: the classes of containers, and names of tensors by their identity."""
    name = type(value).__name__
    if isinstance(value, torch.Tensor):
        return known.get(id(value), "tensor")
    if isinstance(value, dict):
        return f"{name}({', '.join(f'{key!r}: {described(item, known)}' for key, item in value.items())})"
    if isinstance(value, set | frozenset):
        return f"{name}({', '.join(sorted(map(repr, value)))})"
    if hasattr(value, "_fields") or dataclasses.is_dataclass(value) or type(value).__module__ != "builtins":
        fields = getattr(value, "_fields", None) or list(getattr(value, "__dict__", {}))
        if fields:
            return f"{name}({', '.join(f'{field}={described(getattr(value, field), known)}' for field in fields)})"
    if isinstance(value, list | tuple | collections.deque):
        return f"{name}({', '.join(described(item, known) for item in value)})"
    return "array" if isinstance(value, numpy.ndarray) else repr(value)


def steps_of(path: str) -> list[str]:
    """Return the name of a parameter and the steps from it (8.11)."""
    return re.findall(r"^\w+|\[[^\]]*\]|\.\w+", path)


def leaves(value: Any, path: str = "output") -> Iterator[tuple[str, Any]]:
    """Yield the leaves of a result of tuples, lists and dicts, with their paths."""
    if isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from leaves(item, f"{path}[{index}]")
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from leaves(item, f"{path}[{key!r}]")
    elif value is not None:
        yield path, value
