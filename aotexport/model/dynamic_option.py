"""The option `--dynamic 'x:0=batch[1:64]'`: its grammar, and its place in the nested `dynamic_shapes`.

    INPUT [: AXIS] = [FACTOR *] NAME [ '[' MIN : MAX ']' ] [+ OFFSET]

INPUT is the path of a tensor in the example call, with one of its axes, or of an integer, without: `x`, `batch['ids']`,
`batch.ids`, `layers[0]`. MIN and MAX bound NAME; without them the bounds are 0 and none. One NAME in several places is
one dimension.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.export import Dim

from aotexport.errors import ModelFileInvalid
from aotexport.model.call import ExampleCall, example_call
from aotexport.model.dynamic_shapes import nested_sizes
from aotexport.model.source import ModelSource
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

Bounds = tuple[int | None, int | None]


@dataclass(frozen=True)
class DynamicSize:
    """One option, parsed.

    Attributes:
        text: the option as the user wrote it.
        parameter: parameter of the model that the input is in.
        steps: keys, field names and indices from the parameter to the input.
        axis: axis of the tensor; None: the input is an integer.
        name: name of the dimension.
        bounds: least and greatest value of the dimension; None: not given here.
        factor: the size is `factor * dimension + offset`.
        offset: see `factor`.
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
    """Parse the option `text`.

    Raises:
        ModelFileInvalid: it does not follow the grammar, or its bounds leave no choice.
    """
    match = _OPTION.fullmatch(text.strip())
    path = None if match is None else split_path(match["input"].strip())
    if match is None or path is None:
        raise wrong(text, _SYNTAX)
    axis = None if match["axis"] is None else int(match["axis"])
    bounds = _bounds(text, match) if match["bounds"] else None
    factor = int(match["factor"] or 1)
    if factor == 0:
        raise wrong(text, "the factor is 0")
    offset = int(match["offset"] or 0) * (-1 if match["sign"] == "-" else 1)
    return DynamicSize(text, *path, axis, match["name"], bounds, factor, offset)


def _bounds(text: str, match: re.Match[str]) -> Bounds:
    low, high = (int(bound) if bound else None for bound in (match["min"], match["max"]))
    is_integer = match["axis"] is None
    if not is_integer and min(low or 0, high or 0) < 0:
        raise wrong(text, f"[{match['min']}:{match['max']}] has a size below 0")
    if high is not None and high <= (low or 0):
        raise wrong(text, f"[{match['min']}:{match['max']}] leaves no choice of {'values' if is_integer else 'sizes'}")
    return low, high


def wrong(text: str, why: str) -> ModelFileInvalid:
    """Return the refusal of the option `text`."""
    return ModelFileInvalid(f"--dynamic {text!r}: {why}")


def split_path(path: str) -> tuple[str, tuple[str | int, ...]] | None:
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
    """Return the `dynamic_shapes` of the model file with the command line's options on top.

    Args:
        source: the model file.
        options: values of `--dynamic`.

    Raises:
        ModelFileInvalid: an option is malformed, contradicts another, or names no tensor or axis of the example call.
    """
    if not options:
        return source.dynamic_shapes
    call = example_call(source.target, source.args, source.kwargs, source.dynamic_shapes)
    return merged(call, [parse_dynamic(option) for option in options])


def merged(call: ExampleCall, wanted: Sequence[DynamicSize]) -> Any:
    """Return the `dynamic_shapes` of a call with options on top.

    Args:
        call: the example call; its dimensions are replaced.
        wanted: the options.

    Raises:
        ModelFileInvalid: an option contradicts another, or names no tensor or axis of the example call.
    """
    dimensions = _dimensions(wanted, call)
    integers: dict[int, Any] = {}
    for option in wanted:
        place = find(call, option)
        dimension = _derived(dimensions[option.name], option)
        if option.axis is None:
            integers[id(place)] = dimension
            continue
        assert isinstance(place, Leaf)
        rank = call.tensors[place.index].dim()
        if not -rank <= option.axis < rank:
            raise wrong(option.text, f"the tensor has {rank} axes in the example call, no axis {option.axis}")
        axes = call.axes[place.index] or {}
        call.axes[place.index] = axes
        axes[option.axis % rank] = dimension
    size_of = functools.partial(_size_of, call=call, integers=integers)
    return {parameter.name: nested_sizes(parameter.tree, size_of) for parameter in call.parameters}


def _derived(dimension: Any, option: DynamicSize) -> Any:
    multiple = dimension * option.factor if option.factor != 1 else dimension
    return multiple + option.offset if option.offset else multiple


def _dimensions(wanted: Iterable[DynamicSize], call: ExampleCall) -> dict[str, Any]:
    """Return a dimension per name. Bounds may stand at any place of the name; without any, the file's hold."""
    bounds: dict[str, Bounds] = {}
    for option in wanted:
        if option.bounds is not None and bounds.setdefault(option.name, option.bounds) != option.bounds:
            raise wrong(option.text, f"`{option.name}` has other bounds in another --dynamic")
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


def find(call: ExampleCall, option: DynamicSize) -> Leaf | Constant:
    """Return the place of the option's input: that of a tensor for an option with an axis, of an integer without.

    Raises:
        ModelFileInvalid: the call has no such input.
    """
    trees: dict[str, Tree] = {}
    for parameter in call.parameters:
        trees[parameter.name] = parameter.tree
        if parameter.kind == "var_keyword" and isinstance(parameter.tree, Mapping):
            trees |= {str(key): item for key, item in zip(parameter.tree.keys, parameter.tree.items, strict=True)}
    tree = trees.get(option.parameter)
    for step in option.steps:
        tree = None if tree is None else _child(tree, step)
    if not isinstance(tree, Leaf | Constant):
        kind = "tensor" if option.axis is not None else "integer"
        raise wrong(option.text, f"there is no such {kind} in the example call; {_inputs(call)}")
    value = tree.value if isinstance(tree, Constant) else call.tensors[tree.index]
    if isinstance(value, torch.Tensor):
        if option.axis is None:
            raise wrong(option.text, "it is a tensor; say which of its axes, INPUT:AXIS=NAME")
    elif type(value) is not int:
        raise wrong(option.text, f"it is no tensor and no integer in the example call; {_inputs(call)}")
    elif option.axis is not None:
        raise wrong(option.text, "it is an integer, which has no axes; write INPUT=NAME")
    return tree


def _inputs(call: ExampleCall) -> str:
    """Return a sentence that lists the inputs that may be dynamic."""
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
    return tree.items[list(keys).index(step)] if step in keys else None


def _size_of(place: Leaf | Constant, call: ExampleCall, integers: dict[int, Any]) -> Any:
    """Return the dimensions of an input.

    Args:
        place: its place in a tree of the call.
        call: has the axes of tensors, and the model file's dimensions of integers.
        integers: the dimension of integers by the identity of their place.
    """
    if id(place) in integers or isinstance(place, Constant):
        return integers.get(id(place))
    axes = call.axes[place.index]
    return axes if axes is None or isinstance(call.tensors[place.index], torch.Tensor) else axes[0]
