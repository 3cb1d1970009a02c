"""Record the calls of a program, and write them."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from aotexport.eager.python_state import fits
from aotexport.eager.recorded_arguments import (
    EXAMPLE,
    OTHER_SIZES,
    OTHER_VALUES,
    RecordedArguments,
    beginning_at,
    drawn_arguments,
    example_arguments,
    other_integers,
    random_arguments,
    resized_arguments,
    rows_of_example,
    small_arguments,
    symbols_of,
    takes,
)
from aotexport.eager.run import SEED, Run, dropped_gradients, observe_eager, shorter_call
from aotexport.encode.program import EncodedProgram
from aotexport.errors import AttemptFailed, ExportFailed
from aotexport.model.ancestry import loaded_in
from aotexport.model.call import ExampleCall
from aotexport.model.refusals import attempt
from aotexport_runtime.bundle.read import open_bundle
from aotexport_runtime.commands.self_test import run_vector
from aotexport_runtime.errors import CheckFailed, first_line
from aotexport_runtime.module.loading import LoadOptions
from aotexport_runtime.module.recorded import read_vector
from aotexport_runtime.rewrite.names import CHECK
from aotexport_runtime.schema.codec import encode_record
from aotexport_runtime.schema.manifest import VectorEntry, Verification
from aotexport_runtime.schema.program import Program, SizeInput
from aotexport_runtime.schema.vectors import Vector as VectorRecord
from aotexport_runtime.schema.vectors import VectorInput
from aotexport_runtime.values.compare import SAMPLE

_CALLS = 2
"""Number of calls in a row, of which the later ones find what the first one left."""


@dataclass(frozen=True)
class RecordedCall:
    """A recorded call: its record, and the tensors it stores."""

    name: str
    record: VectorRecord
    tensors: dict[str, torch.Tensor]


def record_vectors(
    run: Run, program: Program, verification: Verification = "standard", *, checks_path: bool = False
) -> tuple[Program, list[RecordedCall], dict[str, str]]:
    """Run the eager callable, and record everything that a caller can see.

    Every recorded call is made twice, one after the other; that of the example once, where there is another with other
    sizes or values, which is sure to take the same path through the code, unless the program `checks_path`.
    `verification` `fast` leaves out other values and other integers, and all larger sizes but one of each dynamic axis;
    `full` adds calls with sizes and values that are drawn.

    Returns the program, without the sizes 0 and 1 in its ranges that eager refuses (a trace assumes larger ones); the
    recorded calls, without others that eager refuses; and by symbol, how eager refuses these sizes. `ExportFailed`:
    eager fails on the example.
    """
    example = example_arguments(run.call, program)
    sized = any(not isinstance(program.inputs[each.input_index], SizeInput) for each in program.dimensions)
    once = verification != "full" and (sized or verification != "fast") and not checks_path
    vectors = [_record(run, program, example, 1 if once else _CALLS)]
    program, others, failing = _others(run, program, example, verification)
    if once and not any(each.name in (OTHER_SIZES, OTHER_VALUES) for each in others):
        vectors = [_record(run, program, example)]
    return program, vectors + others, failing


def _others(
    run: Run, program: Program, example: RecordedArguments, verification: Verification
) -> tuple[Program, list[RecordedCall], dict[str, str]]:
    """Return what `record_vectors` does, without the call of the example."""
    if (inherited := _inherited_arguments(run.call, program, example, verification)) is not None:
        return program, list(accepted_calls(run, program, inherited)), {}
    generator = torch.Generator().manual_seed(SEED)
    others = random_arguments(example, generator)
    vectors: list[RecordedCall] = []
    failing: dict[str, str] = {}
    for dimension in program.dimensions:
        if isinstance(program.inputs[dimension.input_index], SizeInput):
            continue
        small: list[RecordedCall] = []
        for size in range(dimension.min or 0, 2):
            drawn = small_arguments(program, example, dimension, size, generator)
            tried = [*([] if drawn is None else [drawn]), *rows_of_example(program, example, dimension, size)]
            errors: list[str] = []
            if (accepted := next(accepted_calls(run, program, tried, errors), None)) is not None:
                small.append(accepted)
            elif tried:
                small.clear()
                program = beginning_at(program, dimension.symbol, size + 1)
                failing[dimension.symbol] = f"the model fails where it is {size} ({errors[-1]})"
        vectors += small
    known = {_sizes(vector.record.inputs) for vector in vectors}
    further = _further_arguments(program, example, others, generator, verification)
    vectors += accepted_calls(run, program, [each for each in further if _sizes(each.specs) not in known])
    # Where they are of other sizes too, other values cost no call of the example's.
    if verification == "full" or (verification != "fast" and (not vectors or vectors[-1].name != OTHER_SIZES)):
        vectors += accepted_calls(run, program, [others])
    return program, vectors, failing


def _sizes(inputs: Iterable[VectorInput]) -> tuple[Any, ...]:
    return tuple([spec.shape if spec.value is None else spec.value for spec in inputs])


def accepted_calls(
    run: Run, program: Program, several: Iterable[RecordedArguments], errors: list[str] | None = None
) -> Iterator[RecordedCall]:
    """Yield recorded calls, without those that eager refuses; `errors` gets a sentence for each of these."""
    for arguments in several:
        try:
            yield _record(run, program, arguments)
        except ExportFailed as refusal:
            if errors is not None:
                errors.append(f"{type(refusal.error).__name__}: {first_line(refusal.error)}")


def _further_arguments(
    program: Program,
    example: RecordedArguments,
    others: RecordedArguments,
    generator: torch.Generator,
    verification: Verification,
) -> Iterator[RecordedArguments]:
    resized = resized_arguments(program, others, generator)
    if verification == "fast":
        yield from resized[-1:]
        return
    yield from other_integers(program, example)
    if verification == "full":
        yield from drawn_arguments(program, example, generator)
    yield from resized


def _record(run: Run, program: Program, arguments: RecordedArguments, calls: int = _CALLS) -> RecordedCall:
    try:
        with attempt(f"recorded call `{arguments.name}`"):
            if arguments.name != EXAMPLE:
                arguments = arguments.generated(program, SEED)
            run.begin()
            seen = observe_eager(run.call, run.state, program, arguments, calls)
    except AttemptFailed as refusal:
        message = f"the model fails on its {arguments.name} inputs: {refusal}"
        raise AttemptFailed(message, refusal.error) from refusal.error
    values = {f"v{index}": value for index, value in enumerate(seen.values.values())}
    record = VectorRecord(
        program=program.name,
        seed=SEED,
        calls=calls,
        backward=program.grad,
        dropped_gradients=dropped_gradients(run.state) if program.grad else (),
        inputs=arguments.specs,
        facts=seen.facts,
        values=tuple(seen.values),
        sample=SAMPLE,
    )
    return RecordedCall(arguments.name, record, {**arguments.stored, **values})


def write_vectors(vectors: Iterable[RecordedCall], directory: Path) -> tuple[VectorEntry, ...]:
    """Write the vectors below `directory`; return their manifest entries."""
    folder = directory / "testvectors"
    folder.mkdir(exist_ok=True)
    entries: list[VectorEntry] = []
    for vector in vectors:
        stem = record_path(directory, vector).stem
        (folder / f"{stem}.json").write_bytes(encode_record(vector.record))
        generated = {spec.key for spec in vector.record.inputs if spec.quantiles}
        kept = {key: tensor for key, tensor in vector.tensors.items() if key not in generated}
        tensors = {key: torch.view_as_real(each) if each.is_complex() else each for key, each in kept.items()}
        save_file(tensors, folder / f"{stem}.safetensors")
        entries.append(
            VectorEntry(
                program=vector.record.program,
                name=vector.name,
                record=f"testvectors/{stem}.json",
                tensors=f"testvectors/{stem}.safetensors",
            )
        )
    return tuple(entries)


def record_path(directory: Path, vector: RecordedCall) -> Path:
    """Return the path of the record of a vector below `directory`."""
    return directory / "testvectors" / f"{vector.record.program}.{vector.name}.json"


def without_vectors(
    entries: tuple[VectorEntry, ...], refused: Container[tuple[str, str]], directory: Path
) -> tuple[VectorEntry, ...]:
    """Delete the files of some vectors below `directory`, given by program and name; return the other entries."""
    remaining = tuple(entry for entry in entries if (entry.program, entry.name) not in refused)
    for entry in set(entries) - set(remaining):
        (directory / entry.record).unlink()
        (directory / entry.tensors).unlink()
    return remaining


def _inherited_arguments(
    call: ExampleCall, program: Program, example: RecordedArguments, verification: Verification
) -> list[RecordedArguments] | None:
    """Return the arguments of the further calls that a loaded bundle has recorded; None: they are of other programs.

    Sizes that the model refused were found out at the first export, and its graph does not tell them.
    """
    found = [module for path, module in loaded_in(call) if not path]
    if not found or (found[0].bundle.manifest.verification or "standard") != verification:
        return None
    bundle = found[0].bundle
    recorded: dict[str, RecordedArguments] = {}
    for entry in bundle.manifest.testvectors:
        if entry.program == program.name:
            vector, stored = read_vector(bundle, entry)
            results = {f"v{index}" for index in range(len(vector.values))}
            arguments = {key: tensor for key, tensor in stored.items() if key not in results}
            recorded[entry.name] = RecordedArguments(entry.name, vector.inputs, arguments)
    known = recorded.pop(example.name, None)
    if known is None or not _are_same(known, example) or _ranges(bundle.program(program.name)) != _ranges(program):
        return None
    return [arguments for arguments in recorded.values() if takes(program, symbols_of(program, arguments.specs))]


def _ranges(program: Program) -> list[tuple[int | None, int | None]]:
    return [(size.min, size.max) for size in program.dimensions]


def _are_same(one: RecordedArguments, other: RecordedArguments) -> bool:
    tensors = one.stored
    return (
        one.specs == other.specs
        and tensors.keys() == other.stored.keys()
        and all(torch.equal(tensor, tensors[key]) for key, tensor in other.stored.items())
    )


def checked_programs(programs: Iterable[EncodedProgram]) -> dict[str, str]:
    """Return the names of the programs that check values, each with a target that can run all its calls."""
    return {
        program.record.name: "autograd" if program.record.forward.differentiable else "portable"
        for program in programs
        if any(node.op == CHECK for graph in program.graphs.values() for node in graph.nodes)
    }


def shorter_on_path(program: EncodedProgram, call: ExampleCall) -> ExampleCall | None:
    """Return a call that takes the program's path in less time than the example; None: none is known."""
    shorter = None if checked_programs([program]) else shorter_call(call)
    return shorter if shorter is not None and fits(program.record, shorter) else None


def on_path(
    directory: Path, checked: dict[str, str], vectors: Iterable[RecordedCall]
) -> tuple[list[RecordedCall], dict[str, list[str]]]:
    """Return the recorded calls that pass the checks of their program, and the names of the others, per program."""
    namespaces = open_bundle(directory).manifest.requirements.operator_namespaces
    followed: list[RecordedCall] = []
    refused: dict[str, list[str]] = {}
    for vector in vectors:
        target = checked.get(vector.record.program)
        error = ""
        if target is not None:
            error = run_vector(
                directory,
                vector.name,
                vector.record,
                vector.tensors,
                LoadOptions(target=target, operator_namespaces=namespaces, mapped=True),
            ).error
        if not error.startswith(f"{CheckFailed.__name__}: "):
            followed.append(vector)
        elif vector.name == "example":
            raise ExportFailed(
                f"the example call, made {vector.record.calls} times with the same inputs, takes different paths "
                f"through the code. {error.partition(': ')[2]}"
            )
        else:
            refused.setdefault(vector.record.program, []).append(vector.name)
    return followed, refused
