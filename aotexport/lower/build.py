"""Lowered forms of the programs of an export: made per program, compiled together, written below `targets/`."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

from aotexport.capture.functional.capture import Refused
from aotexport.capture.trace.forward_capture import ForwardCapture
from aotexport.encode.program import EncodedProgram
from aotexport.lower.targets import Targets
from aotexport.torch_internals.functional import FunctionalCapture
from aotexport_runtime.schema import encode_record

CUDA = "cuda"
"""The target that has lowered graphs and kernels."""


def with_lowered(
    program: EncodedProgram, forward: ForwardCapture, functional: FunctionalCapture | Refused, targets: Targets
) -> EncodedProgram:
    """Return a program with its lowered forms, or with a note why it has none.

    Args:
        program: the program with its functional graph.
        forward: its captured forward graph.
        functional: its functional graph.
        targets: the targets of the export.
    """
    if not targets.cuda:
        return program
    if isinstance(functional, Refused) or program.record.functional is None:
        return _noted(program, "it has no functional graph")
    from aotexport.lower.cuda.program import lower_program
    from aotexport.lower.cuda.retarget import CannotLower

    try:
        lowered = lower_program(program.record, forward, functional)
    except CannotLower as error:
        return _noted(program, str(error))
    return dataclasses.replace(program, lowered={CUDA: lowered})


def with_results_apart(program: EncodedProgram) -> EncodedProgram:
    """Return a program whose kernels share memory with inputs only where its functional graph does."""
    functional = program.record.functional
    if CUDA not in program.lowered or functional is None:
        return program
    from aotexport.lower.cuda.sharing import unshared

    lowered = program.lowered[CUDA]
    file = lowered.record.forward
    graph = unshared(lowered.graphs[file], program.graphs[functional.file], functional)
    return dataclasses.replace(
        program, lowered={CUDA: dataclasses.replace(lowered, graphs={**lowered.graphs, file: graph})}
    )


def _noted(program: EncodedProgram, reason: str) -> EncodedProgram:
    note = f"program {program.record.name} has no kernels: {reason}"
    return dataclasses.replace(program, notes=(*program.notes, note))


@dataclasses.dataclass(frozen=True)
class TargetFiles:
    """Files that the programs of a target share.

    Attributes:
        files: contents by path below `targets/`.
        notes: sentences for the user about failures of the compiler.
    """

    files: dict[str, bytes] = dataclasses.field(default_factory=dict)
    notes: tuple[str, ...] = ()


def compile_targets(
    programs: Sequence[EncodedProgram],
    targets: Targets,
    progress: Callable[[int, int], None],
    *,
    kernel_sources: bool = True,
    root: Path | None = None,
) -> TargetFiles:
    """Compile the kernels that lowered programs launch.

    Args:
        programs: the programs of the export.
        targets: the targets of the export.
        progress: called with the number of finished compilations and of all.
        kernel_sources: keep the kernels' sources.
        root: directory that source files of the user are relative to; None: kernels do not record the user's lines.
    """
    lowered = [program.lowered[CUDA] for program in programs if program.lowered]
    if not lowered:
        return TargetFiles()
    from aotexport.lower.cuda.compile import compile_kernels
    from aotexport.lower.cuda.library import library_files
    from aotexport.lower.cuda.sources import joined

    kernels = joined(kernel for program in lowered for kernel in program.kernels)
    compiled = compile_kernels(kernels.values(), targets.cuda, progress=progress)
    files = library_files(kernels.values(), compiled, targets.cuda, sources=kernel_sources, root=root)
    notes = tuple(
        f"kernel {job.kernel} (candidate {job.candidate}) has no code for {job.architecture}: {reason}"
        for job, reason in compiled.failures.items()
    )
    return TargetFiles({f"{CUDA}/kernels/{name}": data for name, data in files.items()}, notes)


def write_targets(programs: Sequence[EncodedProgram], shared: TargetFiles, directory: Path) -> None:
    """Write the lowered forms of programs below `directory`, in place of those there."""
    root = directory / "targets"
    for old in root.glob("*"):
        # Libraries of processors are written once, after the graphs were verified.
        if not old.name.startswith("cpu-"):
            shutil.rmtree(old)
    files: dict[str, bytes] = {}
    for program in programs:
        for target, lowered in program.lowered.items():
            place = f"{target}/programs/{program.record.name}"
            files[f"{place}/lowered.json"] = encode_record(lowered.record)
            for name, graph in lowered.graphs.items():
                files[f"{place}/{name}"] = encode_record(graph, indent=False)
    remaining = {name.partition("/")[0] for name in files}
    files |= {name: data for name, data in shared.files.items() if name.partition("/")[0] in remaining}
    for name, data in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
