"""Which calls take a program's path through the code: recorded ones that do not are left out."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from aotexport.eager.python_state import fits
from aotexport.eager.shorter_call import shorter_call
from aotexport.encode.program import EncodedProgram
from aotexport.errors import ExportFailed
from aotexport.model.call import ExampleCall
from aotexport.vectors.record import RecordedCall
from aotexport_runtime.bundle.read import open_bundle
from aotexport_runtime.commands.self_test import run_vector
from aotexport_runtime.errors import CheckFailed
from aotexport_runtime.module.loading import LoadOptions
from aotexport_runtime.rewrite.names import CHECK


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
    """Return the recorded calls that pass the checks of their program, and the names of the others, per program.

    Raises:
        ExportFailed: the example itself, called again, takes another path.
    """
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
