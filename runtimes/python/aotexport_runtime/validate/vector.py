"""Rules of a recorded call."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from aotexport_runtime.errors import Place
from aotexport_runtime.schema.bounded import MAX_QUANTILES
from aotexport_runtime.schema.program import ArgumentInput, Program, SizeInput, StateInput
from aotexport_runtime.schema.vectors import Vector, VectorInput, spans
from aotexport_runtime.validate.arguments import check_span, span_end
from aotexport_runtime.validate.declared import check_declared
from aotexport_runtime.validate.trees import check_parts, subject_of

MAX_GENERATED = 1 << 28
"""Most elements of an argument that is generated."""
MAX_REPEATED = 1 << 28
"""Most elements of an argument that repeats stored ones."""
GENERATED = ("bfloat16", "float16", "float32", "float64")
"""Dtypes of arguments that are generated."""


def check_vector(vector: Vector, program: Program, *, where: Place) -> None:
    """Refuse a recorded call that does not fit its program, or never ends."""
    message = f"it is of program {vector.program[:80]!r}, not `{program.name}`"
    where.at("program").expect(vector.program == program.name, message, "vector-malformed/program")
    if not check_declared(vector, where):
        return
    arguments = [spec for spec in program.inputs if not isinstance(spec, StateInput)]
    message = f"{len(vector.inputs)} arguments; the program takes {len(arguments)}"
    where.at("inputs").expect(len(vector.inputs) == len(arguments), message, "vector-malformed/inputs")
    keys = [part.key for spec in vector.inputs for part in (spec, *spec.parts)]
    for index, (spec, argument) in enumerate(zip(vector.inputs, arguments, strict=False)):
        with where.at("inputs", index) as here:
            check_parts(spec, set(), here)
            for part in (spec, *spec.parts):
                check_span(part, subject_of(spec), here)
            if spec.quantiles:
                _check_generated(spec, argument, keys.count(spec.key), here)


def check_stored(vector: Vector, shapes: Mapping[str, Sequence[int]], where: Place) -> None:
    """Refuse a checked recorded call that its stored tensors do not fit; `shapes` are theirs, by key."""
    for index, spec in enumerate(vector.inputs):
        for part in () if spec.quantiles else spans(spec):
            with where.at("inputs", index) as here:
                count, subject = next(iter(shapes.get(part.key, ())), 0), f"argument {spec.path!r}"
                fits = span_end(part.shape, part.stride, part.offset) <= count
                here.require(fits, f"{subject} reaches past the end of {part.key!r}", "tensor-stored/vector-span")
                fits = math.prod(part.shape) <= max(MAX_REPEATED, count)
                here.require(fits, f"{subject} repeats {part.key!r} too often", "bundle-limit/repeats")
    for index, name in enumerate(vector.values):
        where.at("values", index).expect(f"v{index}" in shapes, f"no tensor of {name!r}", "tensor-stored/vector-value")


def _check_generated(spec: VectorInput, argument: ArgumentInput | SizeInput, users: int, where: Place) -> None:
    subject = f"argument {spec.path!r} is generated"
    is_plain = spec.value is None and spec.subclass is None and not spec.is_complex and bool(spec.key) and users == 1
    is_float = isinstance(argument, ArgumentInput) and argument.meta.dtype in GENERATED
    expected = f"a tensor of floats with a span of its own, by 2 to {MAX_QUANTILES} quantiles"
    fits = is_plain and is_float and 2 <= len(spec.quantiles) <= MAX_QUANTILES
    where.require(fits, f"{subject}: it must be {expected}", "vector-malformed/generated")
    fits = span_end(spec.shape, spec.stride, spec.offset) <= MAX_GENERATED
    where.require(fits, f"{subject}, with more than {MAX_GENERATED} elements", "vector-malformed/generated-size")
