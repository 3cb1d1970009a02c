"""Dynamic sizes of 0 and 1: traces assume larger ones, and verification tells whether the graphs hold for these too."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from aotexport.eager.recorded_arguments import beginning_at, symbols_of
from aotexport.encode.program import EncodedProgram
from aotexport.model.call import ExampleCall
from aotexport.torch_internals.calls import is_dimension
from aotexport_runtime.bundle.read import Bundle, open_bundle
from aotexport_runtime.commands.results import VectorResult
from aotexport_runtime.schema.manifest import VectorEntry
from aotexport_runtime.schema.program import ArgumentInput, Program, SizeInput
from aotexport_runtime.schema.sizes import SizeExpression

Results = Sequence[VectorResult]


def begun_at_zero(program: Program, call: ExampleCall) -> Program:
    """Return the program with 0 as the least value of sizes that are declared by hints without a least value."""
    declared = dict(zip(call.paths, call.axes, strict=True))
    for dimension in program.dimensions:
        spec = program.inputs[dimension.input_index]
        hint: Any = (declared.get(spec.path) or {}).get(dimension.axis) if isinstance(spec, ArgumentInput) else None
        if dimension.min == 2 and is_dimension(hint) and not hasattr(hint, "__name__") and hint.min is None:
            program = beginning_at(program, dimension.symbol, 0)
    return program


def without_small_sizes(
    directory: Path, programs: Sequence[EncodedProgram], wrong: Iterable[str], results: Results
) -> list[EncodedProgram]:
    """Return the programs; one whose forward graph is wrong only for sizes of 0 or 1 begins above them."""
    wrong = set(wrong)
    return [_beginning_above(directory, p, results) if p.record.name in wrong else p for p in programs]


def _beginning_above(directory: Path, program: EncodedProgram, results: Results) -> EncodedProgram:
    record = program.record
    small = _small_calls(directory, [record.name], results)
    names = _blamed(small)
    if not names or "example" in small:
        return program
    least = 1 if all(name.endswith("-is-0") for name in small) else 2
    does = f"the model does something else where it is {'0' if least == 1 else '0 or 1'}"
    outside = dict(program.outside)
    for dimension in record.dimensions:
        if dimension.name in names:
            record = beginning_at(record, dimension.symbol, least)
            outside[dimension.symbol] = does
    return replace(program, record=record, outside=outside)


def beyond_ranges(directory: Path, programs: Sequence[EncodedProgram]) -> set[tuple[str, str]]:
    """Return the recorded calls of a bundle, as program and name, with sizes outside of the new ranges of programs."""
    bundle = open_bundle(directory, check_digests=False)
    least = {p.record.name: {d.symbol: d.min for d in p.record.dimensions if d.min is not None} for p in programs}
    found: set[tuple[str, str]] = set()
    for entry in bundle.manifest.testvectors:
        sizes = symbols_of(bundle.program(entry.program), bundle.vector(entry).inputs)
        if any(sizes[symbol] < low for symbol, low in least[entry.program].items()):
            found.add((entry.program, entry.name))
    return found


def with_functional_of_larger_sizes(
    directory: Path, program: EncodedProgram, results: Results
) -> EncodedProgram | None:
    """Return a program with its functional graph, which disagrees, for sizes above 1; None: there it disagrees too."""
    record = program.record
    small = _small_calls(directory, [record.name], results)
    if not small or "example" in small or record.functional is None:
        return None
    names = _blamed(small)
    if any(sizes.isdisjoint(names) for sizes in small.values()):
        return None
    symbols = [dimension.symbol for dimension in record.dimensions if dimension.name in names]
    larger = tuple(SizeExpression(op="le", args=(2, symbol)) for symbol in symbols)
    functional = msgspec.structs.replace(record.functional, guards=(*record.functional.guards, *larger))
    return replace(program, record=msgspec.structs.replace(record, functional=functional))


def small_sizes(directory: Path, programs: Sequence[str], results: Results) -> str | None:
    """Return a way out if programs disagree only in calls with a dynamic size of 0 or 1, also the example's."""
    small = _small_calls(directory, programs, results)
    if not small:
        return None
    names = ", ".join(f"`{name}`" for name in _blamed(small))
    return (
        f"the model does something else where {names} is 0 or 1, as in the example, than for larger sizes: give a "
        "larger example, and 1 is served by a variant"
    )


def _small_calls(directory: Path, programs: Sequence[str], results: Results) -> dict[str, set[str]]:
    """Return the sizes of 0 or 1 per recorded call that disagrees; empty if a call without such sizes disagrees."""
    failing = {(r.program, r.vector) for r in results if r.program in programs and not r.agrees}
    bundle = open_bundle(directory, check_digests=False)
    small: dict[str, set[str]] = {}
    for entry in bundle.manifest.testvectors:
        if (entry.program, entry.name) in failing:
            small.setdefault(entry.name, set()).update(_small(bundle, entry))
            if not _small(bundle, entry):
                return {}
    return small


def _blamed(small: dict[str, set[str]]) -> list[str]:
    """Return the sizes to blame for disagreeing calls: those of calls made to try one size, if there are any."""
    tried = [sizes for name, sizes in small.items() if name.endswith(("-is-0", "-is-1"))]
    return sorted(set().union(*(tried or small.values())))


def _small(bundle: Bundle, entry: VectorEntry) -> set[str]:
    program = bundle.program(entry.program)
    symbols = symbols_of(program, bundle.vector(entry).inputs)
    return {
        dimension.name
        for dimension in program.dimensions
        if symbols[dimension.symbol] in (0, 1) and not isinstance(program.inputs[dimension.input_index], SizeInput)
    }
