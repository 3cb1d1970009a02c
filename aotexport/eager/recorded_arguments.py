"""Arguments of recorded calls: the example's, others of the same kind, and those of other sizes."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import torch

from aotexport.model.call import ExampleCall
from aotexport.model.memory_snapshots import bytes_of
from aotexport.values.subclasses import encode_subclass
from aotexport_runtime.bundle.generated import generated_floats
from aotexport_runtime.schema.program import ArgumentInput, Program, SizeInput, StateInput
from aotexport_runtime.schema.sizes import Dimension
from aotexport_runtime.schema.vectors import VectorInput, VectorPart
from aotexport_runtime.validate.arguments import span_end
from aotexport_runtime.validate.vector import GENERATED
from aotexport_runtime.values import dtypes
from aotexport_runtime.values.sizes import UNDEFINED, evaluate
from aotexport_runtime.values.subclasses import parts

EXAMPLE = "example"
"""Name of the call with the user's own arguments."""
OTHER_SIZES = "other-sizes"
"""Name of the call with other values, in which each dynamic dimension has a size of its own."""
OTHER_VALUES = "random"
"""Name of the call with other values of the example's sizes."""
_MAX_NUMEL = 1 << 26
_MAX_INTEGER = 1 << 12
_DRAWN_CALLS = 8
_MAX_ROWS = 8
_MAX_DRAWN_SIZE = 64


_Fill = Callable[[torch.Tensor, VectorInput, torch.Tensor], torch.Tensor]
"""Makes the storage of an argument from the example's, with its specification and the places of the new elements."""
_LEAST_GENERATED = 1 << 12
"""Least elements of a span that is generated."""
_QUANTILES = 33
_DISTINCT = 1 << 10
"""Floats of 16 bits have few values; more than half as many distinct ones show that a span is no mask."""


@dataclass(frozen=True)
class RecordedArguments:
    """Arguments of a call to record: their specifications, and the spans of storage that they are made of."""

    name: str
    specs: tuple[VectorInput, ...]
    stored: dict[str, torch.Tensor]

    def generated(self, program: Program, seed: int) -> RecordedArguments:
        """Return the arguments with others for large spans of floats, which a reader can make from a seed."""
        keys = [part.key for spec in self.specs for part in (spec, *spec.parts)]
        specs, stored = list(self.specs), dict(self.stored)
        for place, spec in enumerate(self.specs):
            if keys.count(spec.key) == 1 and (span := stored.get(spec.key)) is not None and _is_continuous(spec, span):
                ordered = span.sort().values
                at = torch.linspace(0, len(span) - 1, _QUANTILES, dtype=torch.float64).round().to(torch.int64)
                quantiles = tuple(ordered[at].to(torch.float64).tolist())
                specs[place] = msgspec.structs.replace(spec, quantiles=quantiles)
                dtype = dtypes.name_of(span.dtype)
                made = generated_floats(seed, place, len(span), quantiles, dtype)
                stored[spec.key] = torch.from_numpy(made).to(span.dtype)
        return replace(self, specs=tuple(specs), stored=stored)


def _is_continuous(spec: VectorInput, span: torch.Tensor) -> bool:
    """Return whether a span is an argument alone, large, and of floats that mostly differ: no mask, no one-hot rows."""
    if spec.is_complex or spec.subclass is not None or dtypes.name_of(span.dtype) not in GENERATED:
        return False
    if len(span) < _LEAST_GENERATED or len(span) != span_end(spec.shape, spec.stride, spec.offset):
        return False
    return bool(span.isfinite().all()) and mostly_differ(span)


def mostly_differ(span: torch.Tensor) -> bool:
    """Return whether a span is of many different values."""
    return 2 * len(span.unique()) > min(len(span), _DISTINCT)


def example_arguments(call: ExampleCall, program: Program) -> RecordedArguments:
    """Return the arguments of the example call; arguments that share storage share it again when remade."""
    by_path = dict(zip(call.paths, call.tensors, strict=True))
    stored: dict[str, torch.Tensor] = {}
    keys: dict[int, str] = {}
    specs: list[VectorInput] = []
    for spec in program.inputs:
        if isinstance(spec, StateInput):
            continue
        if isinstance(spec, SizeInput):
            specs.append(VectorInput(path=spec.path, value=by_path[spec.path]))
            continue
        tensor = by_path[spec.path]
        own = [_span(part, stored, keys) for part in parts(tensor)]
        flags = {"path": spec.path, "requires_grad": tensor.requires_grad, "is_leaf": tensor.is_leaf}
        subclass = encode_subclass(tensor, f"`{spec.path}`")
        if subclass is None:
            specs.append(VectorInput(**flags, **own[0]))
        else:
            specs.append(VectorInput(**flags, subclass=subclass, parts=tuple(VectorPart(**span) for span in own)))
    return RecordedArguments(EXAMPLE, tuple(specs), stored)


def _span(tensor: torch.Tensor, stored: dict[str, torch.Tensor], keys: dict[int, str]) -> dict[str, Any]:
    """Store the storage of a plain tensor once; return the tensor's place in it."""
    pointer = tensor.untyped_storage().data_ptr()
    key = keys.setdefault(pointer if pointer else -len(keys) - 1, f"input{len(keys)}")
    if key not in stored:
        count = tensor.untyped_storage().nbytes() // tensor.element_size()
        stored[key] = bytes_of(tensor.detach(), 0, count).view(tensor.dtype).cpu().clone()
    return {
        "key": key,
        "shape": tuple(tensor.shape),
        "stride": tuple(tensor.stride()),
        "offset": int(tensor.storage_offset()),
        "is_complex": tensor.is_complex(),
    }


def random_arguments(example: RecordedArguments, generator: torch.Generator) -> RecordedArguments:
    """Return other values of the example's kind and sizes."""
    stored = {key: _shuffled(tensor, generator) for key, tensor in example.stored.items()}
    return RecordedArguments(OTHER_VALUES, example.specs, stored)


def _shuffled(tensor: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Return other values of the same kind: a permutation, and for floats a little noise of the same scale.

    Ascending integers stay: kernels trust that offsets, lengths and positions are in order.
    """
    counts = not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool)
    if counts and bool((tensor.to(torch.int64).diff() >= 0).all()):
        return tensor.clone()
    values = tensor[torch.randperm(tensor.numel(), generator=generator)]
    if not values.is_floating_point() or values.numel() < 2:
        return values
    wide = values.to(torch.float64)
    noisy = wide + 0.1 * wide.std() * torch.randn(values.shape, generator=generator, dtype=torch.float64)
    # Values of a range that the model may rely on (probabilities, masks) stay in it.
    return noisy.clamp(wide.min(), wide.max()).to(values.dtype)


def small_arguments(
    program: Program, example: RecordedArguments, dimension: Dimension, size: int, generator: torch.Generator
) -> RecordedArguments | None:
    """Return arguments with `dimension` at `size` and the others above 1; None: the program takes no such call."""
    symbols = {**_generic_sizes(program, example), dimension.symbol: size}
    if not _keeps_guards(program, symbols):
        return None
    return _resized(name_at(dimension, size), program, example, symbols, _drawing(generator))


def rows_of_example(
    program: Program, example: RecordedArguments, dimension: Dimension, size: int
) -> Iterator[RecordedArguments]:
    """Yield the example's arguments with `size` of its rows along `dimension`, one after the other of the first rows.

    Lengths, offsets and indices in them fit the other arguments; not each row need do (the longest of a batch may).
    The last has its integers below `size`: they may be indices of these rows, such as the edges of a graph.
    """
    known = symbols_of(program, example.specs)
    symbols, rows = {**known, dimension.symbol: size}, known[dimension.symbol]
    if rows <= size or not _keeps_guards(program, symbols):
        return
    for first in (*range(min(rows - size + 1, _MAX_ROWS)), -1):

        def take(source: torch.Tensor, spec: VectorInput, places: torch.Tensor, first: int = first) -> torch.Tensor:
            view = source.as_strided(spec.shape, spec.stride, spec.offset)
            if first < 0:
                is_index = view.dtype in (torch.int32, torch.int64)
                first, view = 0, view.clamp(max=max(size - 1, 0)) if is_index else view
            for axis, count in enumerate(places.shape):
                view = view.narrow(axis, first * ((spec.shape[axis] - count) // (rows - size)), count)
            return source.new_zeros(places.numel() and int(places.max()) + 1).index_put((places,), view)

        if (arguments := _resized(name_at(dimension, size), program, example, symbols, take)) is not None:
            yield arguments


def _drawing(generator: torch.Generator) -> _Fill:
    def draw(source: torch.Tensor, spec: VectorInput, places: torch.Tensor) -> torch.Tensor:
        count = places.numel() and int(places.max()) + 1
        return source[torch.randint(source.numel(), (count,), generator=generator)]

    return draw


def name_at(dimension: Dimension, size: int) -> str:
    """Return the name of the recorded call that tries a size, as part of a file's name: `x-shape-0-is-1`."""
    plain = re.sub(r"\W+", "-", dimension.name, flags=re.ASCII).strip("-")[:40]
    return f"{plain}-is-{size}".replace("-is--", "-is-minus-")


def _keeps_guards(program: Program, symbols: dict[str, int]) -> bool:
    try:
        return all(evaluate(guard, symbols) for guard in program.guards)
    except UNDEFINED:
        return False


def other_integers(program: Program, example: RecordedArguments) -> Iterator[RecordedArguments]:
    """Yield the example's arguments with other values of each dynamic integer, such as those at which code branches."""
    known = symbols_of(program, example.specs)
    for dimension in program.dimensions:
        if not isinstance(program.inputs[dimension.input_index], SizeInput):
            continue
        low, high = dimension.min, dimension.max
        here = known[dimension.symbol]
        for value in dict.fromkeys((0, 1, -1, here + 1, low, high)):
            if value is None or value == here or abs(value) > _MAX_INTEGER:
                continue
            if (low is not None and value < low) or (high is not None and value > high):
                continue
            symbols = {**known, dimension.symbol: value}
            if _keeps_guards(program, symbols) and _fits_shapes(program, example, symbols):
                yield RecordedArguments(
                    name_at(dimension, value), _with_integers(program, example.specs, symbols), example.stored
                )


def symbols_of(program: Program, inputs: Sequence[VectorInput]) -> dict[str, int]:
    """Return the value of each symbol in a call with these inputs."""
    arguments = [index for index, spec in enumerate(program.inputs) if not isinstance(spec, StateInput)]
    specs = dict(zip(arguments, inputs, strict=True))
    symbols: dict[str, int] = {}
    for dimension in program.dimensions:
        spec = specs[dimension.input_index]
        size = spec.shape[dimension.axis] if spec.value is None else spec.value
        symbols[dimension.symbol] = (size - dimension.offset) // dimension.factor
    return symbols


def takes(program: Program, symbols: dict[str, int]) -> bool:
    """Return whether these values of all symbols are in the ranges of the program, and meet its guards."""
    in_range = all(
        (d.min is None or d.min <= symbols[d.symbol]) and (d.max is None or symbols[d.symbol] <= d.max)
        for d in program.dimensions
    )
    return in_range and _keeps_guards(program, symbols)


def _fits_shapes(program: Program, example: RecordedArguments, symbols: dict[str, int]) -> bool:
    """Return whether the example's tensors have the shapes of the program for these values of its symbols."""
    metas = [spec.meta for spec in program.inputs if isinstance(spec, ArgumentInput)]
    shapes = [spec.shape for spec in example.specs if spec.value is None]
    return all(
        tuple(evaluate(size, symbols) for size in meta.shape) == shape
        for meta, shape in zip(metas, shapes, strict=True)
    )


def _with_integers(
    program: Program, specs: tuple[VectorInput, ...], symbols: dict[str, int]
) -> tuple[VectorInput, ...]:
    values = {spec.path: symbols[spec.symbol] for spec in program.inputs if isinstance(spec, SizeInput)}
    return tuple(
        spec if spec.value is None else msgspec.structs.replace(spec, value=values[spec.path]) for spec in specs
    )


def beginning_at(program: Program, symbol: str, least: int) -> Program:
    """Return the program with `least` as the least value of `symbol`, or its greatest value if that is smaller."""
    dimensions = [
        msgspec.structs.replace(d, min=least if d.max is None else min(least, d.max)) if d.symbol == symbol else d
        for d in program.dimensions
    ]
    return msgspec.structs.replace(program, dimensions=tuple(dimensions))


def _generic_sizes(program: Program, example: RecordedArguments) -> dict[str, int]:
    """Return a value per symbol, other than 0 and 1 if the range allows; integers stay as in the example."""
    known = symbols_of(program, example.specs)
    integers = {spec.symbol for spec in program.inputs if isinstance(spec, SizeInput)}
    return {
        d.symbol: known[d.symbol]
        if d.symbol in integers
        else min(max(d.min or 0, 5 + 2 * i), d.max if d.max is not None else 1 << 30)
        for i, d in enumerate(program.dimensions)
    }


def resized_arguments(
    program: Program, example: RecordedArguments, generator: torch.Generator
) -> list[RecordedArguments]:
    """Return arguments with every dynamic dimension at its least size, and with each at a size of its own."""
    if not program.dimensions:
        return []
    generic = _generic_sizes(program, example)
    least = {d.symbol: generic[d.symbol] if d.min is None else d.min for d in program.dimensions}
    candidates = {"least-sizes": least, OTHER_SIZES: generic}
    return [
        arguments
        for name, symbols in candidates.items()
        if _keeps_guards(program, symbols)
        and (arguments := _resized(name, program, example, symbols, _drawing(generator))) is not None
    ]


def drawn_arguments(
    program: Program, example: RecordedArguments, generator: torch.Generator
) -> Iterator[RecordedArguments]:
    """Yield arguments with sizes drawn from the ranges of the program, up to 64 above the least, and other values."""
    known = _generic_sizes(program, example)
    integers = {spec.symbol for spec in program.inputs if isinstance(spec, SizeInput)}
    for call in range(1, _DRAWN_CALLS + 1):
        symbols = dict(known)
        for dimension in program.dimensions:
            if dimension.symbol not in integers:
                least = dimension.min or 0
                most = least + _MAX_DRAWN_SIZE if dimension.max is None else min(dimension.max, least + _MAX_DRAWN_SIZE)
                symbols[dimension.symbol] = int(torch.randint(least, most + 1, (), generator=generator))
        values = random_arguments(example, generator)
        if not program.dimensions:
            yield replace(values, name=f"drawn-{call}")
        elif _keeps_guards(program, symbols):
            drawn = _resized(f"drawn-{call}", program, values, symbols, _drawing(generator))
            if drawn is not None:
                yield drawn


def _resized(
    name: str, program: Program, example: RecordedArguments, symbols: dict[str, int], fill: _Fill
) -> RecordedArguments | None:
    metas = iter([spec.meta for spec in program.inputs if isinstance(spec, ArgumentInput)])
    specs: list[VectorInput] = []
    stored: dict[str, torch.Tensor] = {}
    for index, spec in enumerate(_with_integers(program, example.specs, symbols)):
        if spec.value is not None:
            specs.append(spec)
            continue
        meta = next(metas)
        shape = tuple(evaluate(size, symbols) for size in meta.shape)
        stride = tuple(evaluate(step, symbols) for step in meta.stride)
        count = span_end(shape, stride, 0)
        source = example.stored.get(spec.key)
        # The class of a tensor subclass decides the sizes of its parts.
        if source is None:
            return None
        if count > _MAX_NUMEL or not source.numel():
            return None
        key = f"input{index}"
        stored[key] = fill(source, spec, torch.arange(count).as_strided(shape, stride))
        specs.append(
            VectorInput(
                path=spec.path,
                key=key,
                shape=shape,
                stride=stride,
                requires_grad=spec.requires_grad,
                is_leaf=spec.is_leaf,
                is_complex=spec.is_complex,
            )
        )
    return RecordedArguments(name, tuple(specs), stored)
