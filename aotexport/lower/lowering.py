"""Programs lowered to targets: files and records below `targets/`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import torch

from aotexport.eager.recorded_arguments import symbols_of
from aotexport.encode.program import EncodedProgram
from aotexport.lower.cpu.levels import Level
from aotexport.lower.cpu.partition import NotLowered
from aotexport.lower.cpu.program import lower_program, with_partition
from aotexport.vectors.record import RecordedCall
from aotexport.write.files import custom_operators
from aotexport_runtime.schema import encode_record
from aotexport_runtime.schema.compiled import CompiledProgram, CpuRequirements, Target, TargetRefusal

RECORD_NAME = "target.json"


def lower_programs(
    programs: Sequence[EncodedProgram],
    levels: Sequence[Level],
    vectors: Sequence[RecordedCall],
    directory: Path,
    progress: Callable[[str], None],
) -> list[EncodedProgram]:
    """Compile captured and verified programs for processors; write libraries and records below the bundle's directory.

    `vectors` are the recorded calls, with each program's example. Returns the programs, with the targets that have
    them.
    """
    examples = {vector.record.program: vector.record for vector in vectors if vector.name == "example"}
    prepared = [with_partition(program) for program in programs] if levels else list(programs)
    for level in levels:
        folder = directory / "targets" / level.target
        folder.mkdir(parents=True)
        compiled: list[CompiledProgram] = []
        refusals: list[TargetRefusal] = []
        for index, program in enumerate(prepared):
            name = program.record.name
            progress(f"{name}: {level.target}")
            try:
                if program.launched:
                    raise NotLowered(f"it launches the Triton kernel `{program.launched[0]}`, which CPUs cannot run")
                sizes = symbols_of(program.record, examples[name].inputs)
                namespaces = frozenset(op.partition("::")[0] for op in custom_operators([program]))
                compiled.append(lower_program(program, level, sizes, namespaces, folder))
            except NotLowered as error:
                refusals.append(TargetRefusal(program=name, reason=str(error)))
            else:
                prepared[index] = dataclasses.replace(program, compiled=(*program.compiled, level.target))
        requirements = CpuRequirements(level=level.name, torch=".".join(torch.__version__.split(".")[:2]))
        target = Target(
            name=level.target, requirements=requirements, programs=tuple(compiled), refusals=tuple(refusals)
        )
        write_target(target, directory)
    # A partition that nothing was compiled by is not kept.
    return [new if new.compiled != old.compiled else old for new, old in zip(prepared, programs, strict=True)]


def write_target(target: Target, directory: Path) -> None:
    """Write the record of `target` below `directory`, and remove files that it does not name."""
    folder = directory / "targets" / target.name
    libraries = [
        each for program in target.programs for each in (program.forward, program.backward) if each is not None
    ]
    named = {library.file for library in libraries}
    for path in folder.iterdir():
        if path.name not in named:
            path.unlink()
    (folder / RECORD_NAME).write_bytes(encode_record(target))


def without_program(target: Target, program: str, reason: str) -> Target:
    """Return `target` without `program`, which `reason` rules out."""
    remaining = tuple(compiled for compiled in target.programs if compiled.program != program)
    refusals = (*target.refusals, TargetRefusal(program=program, reason=reason))
    return msgspec.structs.replace(target, programs=remaining, refusals=refusals)
