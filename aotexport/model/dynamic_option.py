"""The option `--dynamic 'x:0=batch[1:64]'`, of an export, and for narrower sizes of a bundle made of a bundle."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.export import Dim

from aotexport.errors import ModelFileInvalid
from aotexport.model.call import ExampleCall, example_call
from aotexport.model.programs import (
    AnyExample,
    Example,
    ModelSource,
    Program,
    as_example,
    method_of,
    nested_sizes,
    scaled,
)
from aotexport.torch_internals.calls import is_dimension
from aotexport_runtime.schema.trees import Constant, Leaf, Mapping, NamedFields, Tree
from aotexport_runtime.values.trees import keys_of, leaves

_OPTION = re.compile(
    r"(?P<input>.+?)(?::(?P<axis>-?\d+))?\s*=\s*"
    r"((?P<factor>\d+)\s*\*\s*)?(?P<name>[^\W\d]\w*)"
    r"(?P<bounds>\[(?P<min>(?:-?\d+)?):(?P<max>(?:-?\d+)?)\])?"
    r"(\s*(?P<sign>[+-])\s*(?P<offset>\d+))?"
)
_SYNTAX = (
    "write INPUT:AXIS=NAME[MIN:MAX], for example 'x:0=batch[1:64]' or 'batch[\"ids\"]:1=2*half'; for an integer "
    "INPUT=NAME[MIN:MAX], for example 'steps=count[1:100]'"
)
_STEP = re.compile(r"\.(?P<name>\w+)|\[(?P<index>\d+)\]|\['(?P<single>[^']*)'\]|\[\"(?P<double>[^\"]*)\"\]")

_LARGEST = 2**63 - 1
"""The greatest size, where no other bound is known."""
_WAY_OUT = "A graph does not tell where the model's code read it as a number: export the model with this option"

Bounds = tuple[int | None, int | None]


@dataclass(frozen=True)
class DynamicSize:
    """One option, parsed: the size is `factor * dimension + offset`.

    Attributes:
        text: the option as the user wrote it.
        steps: keys, field names and indices from the parameter to the input.
        axis: axis of the tensor; None: the input is an integer.
        name: name of the dimension.
        bounds: least and greatest value of the dimension; None: not given here.
    """

    text: str
    parameter: str
    steps: tuple[str | int, ...]
    axis: int | None
    name: str
    bounds: Bounds | None = None
    factor: int = 1
    offset: int = 0


def parse_dynamic(text: str) -> DynamicSize:
    """Parse the option `text`; `ModelFileInvalid`: it does not follow the grammar, or its bounds leave no choice."""
    match = _OPTION.fullmatch(text.strip())
    path = None if match is None else _split_path(match["input"].strip())
    if match is None or path is None:
        raise _wrong(text, _SYNTAX)
    axis = None if match["axis"] is None else int(match["axis"])
    bounds = _bounds(text, match) if match["bounds"] else None
    factor = int(match["factor"] or 1)
    if factor == 0:
        raise _wrong(text, "the factor is 0")
    offset = int(match["offset"] or 0) * (-1 if match["sign"] == "-" else 1)
    return DynamicSize(text, *path, axis, match["name"], bounds, factor, offset)


def _bounds(text: str, match: re.Match[str]) -> Bounds:
    low, high = (int(bound) if bound else None for bound in (match["min"], match["max"]))
    is_integer = match["axis"] is None
    if not is_integer and min(low or 0, high or 0) < 0:
        raise _wrong(text, f"[{match['min']}:{match['max']}] has a size below 0")
    if high is not None and high <= (low or 0):
        raise _wrong(text, f"[{match['min']}:{match['max']}] leaves no choice of {'values' if is_integer else 'sizes'}")
    return low, high


def _wrong(text: str, why: str) -> ModelFileInvalid:
    return ModelFileInvalid(f"--dynamic {text!r}: {why}")


def _split_path(path: str) -> tuple[str, tuple[str | int, ...]] | None:
    """Return the parameter and the steps of a path in a call; None: it is none."""
    parameter = re.match(r"[^\W\d]\w*", path)
    if parameter is None:
        return None
    steps: list[str | int] = []
    position = parameter.end()
    while position < len(path):
        step = _STEP.match(path, position)
        if step is None:
            return None
        named = next((step[kind] for kind in ("name", "single", "double") if step[kind] is not None), None)
        steps.append(int(step["index"]) if named is None else named)
        position = step.end()
    return parameter[0], tuple(steps)


def merge_dynamic(source: ModelSource, options: Sequence[str]) -> Any:
    """Return the `dynamic_shapes` of the model file with values of `--dynamic` on top.

    `ModelFileInvalid`: one is malformed, contradicts another, or names no tensor or axis of the example call.
    """
    if not options:
        return source.example.dynamic_shapes
    return _merged(_called(source.target, source.example), [parse_dynamic(option) for option in options])


def _called(callable_: Any, example: Example) -> ExampleCall:
    return example_call(callable_, example.args, dict(example.kwargs), example.dynamic_shapes)


def _merged(call: ExampleCall, wanted: Sequence[DynamicSize]) -> Any:
    """Return the `dynamic_shapes` of a call, whose dimensions are replaced, with options on top."""
    dimensions = _dimensions(wanted, call)
    integers: dict[int, Any] = {}
    for option in wanted:
        place = _find(call, option)
        dimension = scaled(dimensions[option.name], option.factor, option.offset)
        if option.axis is None:
            integers[id(place)] = dimension
            continue
        assert isinstance(place, Leaf)
        axes = call.axes[place.index] = call.axes[place.index] or {}
        axes[option.axis % call.tensors[place.index].dim()] = dimension
    size_of = functools.partial(_size_of, call=call, integers=integers)
    return {parameter.name: nested_sizes(parameter.tree, size_of) for parameter in call.parameters}


def _dimensions(wanted: Iterable[DynamicSize], call: ExampleCall) -> dict[str, Any]:
    """Return a dimension per name. Bounds may stand at any place of the name; without any, the file's hold."""
    bounds: dict[str, Bounds] = {}
    for option in wanted:
        if option.bounds is not None and bounds.setdefault(option.name, option.bounds) != option.bounds:
            raise _wrong(option.text, f"`{option.name}` has other bounds in another --dynamic")
    dimensions: dict[str, Any] = {
        root.__name__: root
        for axes in call.axes
        for dimension in (axes or {}).values()
        if hasattr(root := getattr(dimension, "root", dimension), "__name__")
    }
    for option in wanted:
        if option.name in bounds or option.name not in dimensions:
            low, high = bounds.get(option.name, (None, None))
            dimensions[option.name] = Dim(option.name, min=low, max=high)
    for axes in call.axes:
        for axis, dimension in (axes or {}).items():
            if isinstance(axes, dict) and getattr(dimension, "__name__", None) in bounds:
                axes[axis] = dimensions[dimension.__name__]
    return dimensions


def _find(call: ExampleCall, option: DynamicSize) -> Leaf | Constant:
    """Return the place of the option's input: that of a tensor for an option with an axis, of an integer without."""
    tree = call.trees().get(option.parameter)
    for step in option.steps:
        tree = None if tree is None else _child(tree, step)
    if not isinstance(tree, Leaf | Constant):
        kind = "tensor" if option.axis is not None else "integer"
        raise _wrong(option.text, f"there is no such {kind} in the example call; {_inputs(call)}")
    value = tree.value if isinstance(tree, Constant) else call.tensors[tree.index]
    if isinstance(value, torch.Tensor):
        if option.axis is None:
            raise _wrong(option.text, "it is a tensor; say which of its axes, INPUT:AXIS=NAME")
        if not -value.dim() <= option.axis < value.dim():
            raise _wrong(option.text, f"the tensor has {value.dim()} axes in the example call, no axis {option.axis}")
    elif type(value) is not int:
        raise _wrong(option.text, f"it is no tensor and no integer in the example call; {_inputs(call)}")
    elif option.axis is not None:
        raise _wrong(option.text, "it is an integer, which has no axes; write INPUT=NAME")
    return tree


def _inputs(call: ExampleCall) -> str:
    tensors = [path for path, leaf in zip(call.paths, call.tensors, strict=True) if isinstance(leaf, torch.Tensor)]
    integers = [
        path
        for parameter in call.parameters
        for path, leaf in leaves(parameter.tree, parameter.name)
        if type(leaf.value if isinstance(leaf, Constant) else call.tensors[leaf.index]) is int
    ]
    listed = f"its tensors are {', '.join(tensors) or 'none'}"
    return f"{listed}; its integers are {', '.join(integers)}" if integers else listed


def _child(tree: Tree, step: str | int) -> Tree | None:
    if isinstance(tree, Leaf | Constant):
        return None
    keys: Sequence[Any] = range(len(tree.items))
    if isinstance(tree, Mapping):
        keys = keys_of(tree)
    elif isinstance(tree, NamedFields) and isinstance(step, str):
        keys = tree.fields
    return tree.items[list(keys).index(step)] if step in keys else None  # pyrefly: ignore[bad-argument-type]


def _size_of(place: Leaf | Constant, call: ExampleCall, integers: dict[int, Any]) -> Any:
    """Return the dimensions of an input, those of integers by the identity of their place."""
    if id(place) in integers or isinstance(place, Constant):
        return integers.get(id(place))
    axes = call.axes[place.index]
    return axes if axes is None or isinstance(call.tensors[place.index], torch.Tensor) else axes[0]


# --- narrower sizes of a bundle ---------------------------------------------------------------------------


def narrowed(source: ModelSource, options: Iterable[str]) -> ModelSource:
    """Return a loaded bundle as a source whose programs take narrower sizes.

    Each option, as `--dynamic` takes it, holds in all programs that have its input. `ModelFileInvalid`: one is
    malformed, names no input of any program, or asks for sizes that the bundle does not take.
    """
    wanted = [parse_dynamic(option) for option in options]
    if not wanted:
        return source
    refusals: dict[str, ModelFileInvalid] = {}
    met: set[str] = set()

    def example_of(example: AnyExample, callable_: Any, *, is_variant: bool = False) -> Example:
        example = as_example(example)
        call = _called(callable_, example)
        own: list[DynamicSize] = []
        for option in wanted:
            try:
                _find(call, option)
                if is_variant:
                    # One for a fixed size, such as one row, stays as it is.
                    _dimension(call, option)
            except ModelFileInvalid as refusal:
                refusals.setdefault(option.text, refusal)
            else:
                own.append(option)
        met.update(option.text for option in own)
        return replace(example, dynamic_shapes=_merged(call, _bounded(call, own))) if own else example

    programs: list[Program] = []
    for program in source.programs or ():
        assert isinstance(program, Program)
        assert program.example is not None
        called = method_of(source.target, program.method)
        example = example_of(program.example, called)
        variants = tuple(example_of(variant, called, is_variant=True) for variant in program.variants)
        programs.append(replace(program, example=example, variants=variants))
    for text, refusal in refusals.items():
        if text not in met:
            raise refusal
    return replace(source, programs=tuple(programs))


def _bounded(call: ExampleCall, wanted: Sequence[DynamicSize]) -> list[DynamicSize]:
    """Return options that have bounds, and hold wherever the call has the dimension of their place."""
    given = {option.name: option.bounds for option in wanted if option.bounds is not None}
    ranges: dict[str, tuple[int, int]] = {}
    found: list[DynamicSize] = []
    for option in wanted:
        before = _dimension(call, option)
        least, most = _range(before, option)
        low, high = given.get(option.name, (None, None))
        if option.name not in given:
            low, high = -((option.offset - least) // option.factor), (most - option.offset) // option.factor
        low, high = least if low is None else low, most if high is None else high
        if option.factor * low + option.offset < least or option.factor * high + option.offset > most:
            raise _wrong(
                option.text,
                f"the bundle takes {_spelled(least, most, option)} there, and its graphs hold for no others",
            )
        other = ranges.get(option.name, (low, high))
        ranges[option.name] = max(low, other[0]), min(high, other[1])
        found += [option, *_alike(call, option, before)]
    bounds = {
        name: (None if low <= -_LARGEST else low, None if high >= _LARGEST else high)
        for name, (low, high) in ranges.items()
    }
    return [replace(option, bounds=bounds[option.name]) for option in found]


def _dimension(call: ExampleCall, option: DynamicSize) -> Any:
    place = _find(call, option)
    if not isinstance(place, Leaf):
        raise _wrong(option.text, f"the bundle was captured for this integer alone. {_WAY_OUT}")
    axes = call.axes[place.index] or {}
    if option.axis is None:
        return axes[0]
    tensor = call.tensors[place.index]
    dimension = axes.get(option.axis % tensor.dim())
    if not is_dimension(dimension):
        size = tensor.shape[option.axis]
        raise _wrong(option.text, f"the bundle was captured for size {size} alone. {_WAY_OUT}")
    return dimension


def _range(dimension: Any, option: DynamicSize) -> tuple[int, int]:
    """Return the least and the greatest value of a dimension; where it has none, torch gives no integer."""
    least, most = getattr(dimension, "min", None), getattr(dimension, "max", None)
    none = 0 if option.axis is not None else -_LARGEST
    return least if isinstance(least, int) else none, most if isinstance(most, int) else _LARGEST


def _spelled(least: int, most: int, option: DynamicSize) -> str:
    what = "integers" if option.axis is None else "sizes"
    low = "" if least == -_LARGEST else f" from {least}"
    return f"{what}{low} on" if most == _LARGEST else f"{what}{low} to {most}"


def _alike(call: ExampleCall, option: DynamicSize, dimension: Any) -> Iterable[DynamicSize]:
    """Yield an option for each other place of a named dimension, which keeps being one dimension."""
    name = getattr(dimension, "__name__", None)
    for path, axes in zip(call.paths, call.axes, strict=True):
        for axis, other in (axes or {}).items():
            place = _split_path(path)
            if name is not None and getattr(other, "__name__", None) == name and place is not None:
                is_integer = not hasattr(call.tensors[call.paths.index(path)], "dim")
                yield replace(option, parameter=place[0], steps=place[1], axis=None if is_integer else axis)
