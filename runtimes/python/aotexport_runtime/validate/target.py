"""Rules of a target: its programs have functional graphs, and its libraries take and return values of these."""

from __future__ import annotations

from aotexport_runtime.errors import Place
from aotexport_runtime.schema.compiled import CompiledHalf, CompiledProgram, Target
from aotexport_runtime.schema.graph import Graph
from aotexport_runtime.schema.manifest import Manifest
from aotexport_runtime.schema.program import FunctionalGraph, Program
from aotexport_runtime.schema.values import TensorMeta
from aotexport_runtime.validate.bounds import check_unique
from aotexport_runtime.validate.declared import check_declared


def check_target(target: Target, manifest: Manifest, *, name: str, where: Place) -> None:
    """Refuse a target whose programs or files are not in the bundle.

    Args:
        target: as decoded.
        manifest: of its bundle, checked.
        name: of its directory.
        where: its file, for errors.

    Raises:
        BundleInvalid: names the fault.
    """
    if target.name != name:
        raise where.at("name").invalid(
            f"it is of target {target.name[:80]!r}, not `{name}`", "target-malformed/target-name"
        )
    faults = where.found
    check_declared(target, where)
    if where.found > faults:
        return
    listed = {entry.path for entry in manifest.files}
    named = [program.program for program in (*target.programs, *target.refusals)]
    check_unique(named, "program", "name-twice/target-program", where)
    having = {entry.name for entry in manifest.programs if name in entry.targets}
    missing = having - {program.program for program in target.programs}
    if missing:
        raise where.invalid(
            f"it lacks program {min(missing)!r}, which the manifest says it has", "target-malformed/lacking-program"
        )
    for index, program in enumerate(target.programs):
        here = where.at("programs", index)
        if program.program not in having:
            raise here.invalid(
                f"the manifest does not say that it has program {program.program[:80]!r}",
                "target-malformed/unlisted-program",
            )
        for library in _libraries(program):
            if f"targets/{name}/{library.file}" not in listed:
                raise here.invalid(f"library {library.file!r} is not listed in the manifest", "file-unlisted/library")


def check_compiled(compiled: CompiledProgram, program: Program, graph: Graph | None, *, where: Place) -> None:
    """Refuse a compiled program that does not fit its functional graph.

    Args:
        compiled: of a checked target.
        program: its program, checked.
        graph: the functional graph of `program`, checked; None: it has none.
        where: its place, for errors.

    Raises:
        BundleInvalid: names the fault.
    """
    if program.functional is None or graph is None:
        raise where.invalid(
            f"program `{program.name}` has no functional graph to be compiled from",
            "target-malformed/compiled-functional",
        )
    gradients = program.functional.gradients
    partitions = {None} if gradients is None else {partition.name for partition in gradients.partitions}
    if (gradients is None) != (compiled.backward is None) or compiled.partition not in partitions:
        raise where.invalid(
            f"program `{program.name}` has no partition {str(compiled.partition)[:80]!r}", "target-malformed/partition"
        )
    check_declared(compiled, where, Program=program, Gradients=gradients)
    tensors = {value.name for value in (*graph.inputs, *graph.nodes) if isinstance(value.meta, TensorMeta)}
    for library in _libraries(compiled):
        for value in (*library.inputs, *library.results):
            if value not in tensors:
                raise where.invalid(
                    f"{value[:80]!r} is no tensor of the functional graph", "reference-missing/library-value"
                )
    _check_halves(compiled, program.functional, graph, tensors, where)


def _check_halves(
    compiled: CompiledProgram, functional: FunctionalGraph, graph: Graph, tensors: set[str], where: Place
) -> None:
    """Refuse libraries that take what their half of the partition does not have, or leave out what it returns."""
    gradients = functional.gradients
    tangents = [] if gradients is None else gradients.tangents
    names = [each.name for each in graph.inputs]
    given = set(names[: len(names) - len(tangents)])
    returned = len(functional.mutations) + len(functional.outputs) + functional.intermediate_bases
    halves = [(compiled.forward, given, graph.outputs[:returned])]
    if gradients is not None and compiled.backward is not None:
        saved = next(each.saved for each in gradients.partitions if each.name == compiled.partition)
        halves.append((compiled.backward, {*names, *saved}, graph.outputs[returned:]))
    for library, inputs, outputs in halves:
        for name in library.inputs:
            if name not in inputs:
                raise where.invalid(
                    f"library {library.file!r} takes {name[:80]!r}, which is no input", "target-malformed/library-input"
                )
        for output in outputs:
            if isinstance(output, str) and output in tensors - inputs - {*library.results}:
                raise where.invalid(
                    f"library {library.file!r} does not return {output[:80]!r}", "target-malformed/library-result"
                )


def _libraries(program: CompiledProgram) -> list[CompiledHalf]:
    return [program.forward] if program.backward is None else [program.forward, program.backward]
