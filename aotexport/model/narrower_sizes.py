"""Narrower dynamic sizes for a bundle that is made of a bundle, by options `x:0=batch[1:64]`.

A graph holds for the sizes that it was captured for, and so for fewer of them: a part of the range, or equal sizes.
For more of them it need not hold: the model's code may have read a fixed size as a number, or branched by it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

from aotexport.errors import ModelFileInvalid
from aotexport.model.call import ExampleCall, example_call
from aotexport.model.dynamic_option import DynamicSize, find, merged, parse_dynamic, split_path, wrong
from aotexport.model.programs import AnyExample, Example, Program, as_example
from aotexport.model.source import ModelSource
from aotexport.torch_internals.calls import is_dimension
from aotexport_runtime.schema.trees import Leaf

_LARGEST = 2**63 - 1
"""The greatest size, where no other bound is known."""


def narrowed(source: ModelSource, options: Iterable[str]) -> ModelSource:
    """Return a loaded bundle as a source whose programs take narrower sizes.

    Args:
        source: made of the loaded bundle.
        options: as `--dynamic` takes them; each holds in all programs that have its input.

    Raises:
        ModelFileInvalid: an option is malformed, names no input of any program, or asks for sizes that the bundle
            does not take.
    """
    wanted = [parse_dynamic(option) for option in options]
    if not wanted:
        return source
    refusals: dict[str, ModelFileInvalid] = {}
    met: set[str] = set()

    def example_of(example: AnyExample, callable_: Any, *, is_variant: bool = False) -> Example:
        example = as_example(example)
        call = example_call(callable_, example.args, dict(example.kwargs), example.dynamic_shapes)
        own: list[DynamicSize] = []
        for option in wanted:
            try:
                find(call, option)
                if is_variant:
                    # One for a fixed size, such as one row, stays as it is.
                    _dimension(call, option)
            except ModelFileInvalid as refusal:
                refusals.setdefault(option.text, refusal)
            else:
                own.append(option)
        met.update(option.text for option in own)
        return dataclasses.replace(example, dynamic_shapes=merged(call, _bounded(call, own))) if own else example

    programs: list[Program] = []
    for program in source.programs or ():
        assert isinstance(program, Program)
        assert program.example is not None
        called = source.target if program.method == "forward" else getattr(source.target, program.method)
        example = example_of(program.example, called)
        variants = tuple(example_of(variant, called, is_variant=True) for variant in program.variants)
        programs.append(dataclasses.replace(program, example=example, variants=variants))
    for text, refusal in refusals.items():
        if text not in met:
            raise refusal
    return dataclasses.replace(source, programs=tuple(programs))


def _bounded(call: ExampleCall, wanted: Sequence[DynamicSize]) -> list[DynamicSize]:
    """Return options that have bounds, and hold wherever the call has the dimension of their place.

    Raises:
        ModelFileInvalid: an option leaves the range of its place.
    """
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
            raise wrong(
                option.text,
                f"the bundle takes {_spelled(least, most, option)} there, and its graphs hold for no others",
            )
        other = ranges.get(option.name, (low, high))
        ranges[option.name] = max(low, other[0]), min(high, other[1])
        found += [option, *_alike(call, option, before)]
    return [dataclasses.replace(option, bounds=_as_given(ranges[option.name])) for option in found]


def _as_given(bounds: tuple[int, int]) -> tuple[int | None, int | None]:
    low, high = bounds
    return None if low <= -_LARGEST else low, None if high >= _LARGEST else high


def _dimension(call: ExampleCall, option: DynamicSize) -> Any:
    """Return the dimension that the call has at the place of an option."""
    place = find(call, option)
    if not isinstance(place, Leaf):
        raise wrong(option.text, f"the bundle was captured for this integer alone. {_WAY_OUT}")
    axes = call.axes[place.index] or {}
    if option.axis is None:
        return axes[0]
    rank = call.tensors[place.index].dim()
    if not -rank <= option.axis < rank:
        raise wrong(option.text, f"the tensor has {rank} axes in the example call, no axis {option.axis}")
    dimension = axes.get(option.axis % rank)
    if not is_dimension(dimension):
        size = call.tensors[place.index].shape[option.axis]
        raise wrong(option.text, f"the bundle was captured for size {size} alone. {_WAY_OUT}")
    return dimension


_WAY_OUT = "A graph does not tell where the model's code read it as a number: export the model with this option"


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
            place = split_path(path)
            if name is not None and getattr(other, "__name__", None) == name and place is not None:
                is_integer = not hasattr(call.tensors[call.paths.index(path)], "dim")
                yield dataclasses.replace(option, parameter=place[0], steps=place[1], axis=None if is_integer else axis)
