"""Verify the written bundle in a fresh process without the exporter, against recorded eager results."""

from __future__ import annotations

import dataclasses
import functools
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from aotexport.errors import VerificationFailed
from aotexport.lower.cpu.program import without_program, write_target
from aotexport.vectors.small_sizes import (
    beyond_ranges,
    small_sizes,
    with_functional_of_larger_sizes,
    without_small_sizes,
)
from aotexport.verify.comparisons import Comparison, comparisons, failures
from aotexport.verify.fresh import FreshProcess, printed
from aotexport_runtime.bundle.read import open_bundle
from aotexport_runtime.commands.results import VectorResult
from aotexport_runtime.engines.cpu.engine import unfit
from aotexport_runtime.schema.manifest import Manifest, Requirements

if TYPE_CHECKING:
    from aotexport.encode.program import EncodedProgram
    from aotexport.lower.targets import Level
    from aotexport.vectors.eager_errors import EagerErrors

TIMEOUT_S = 3600
TARGETS = ("autograd", "portable")


def verify_bundle(
    directory: Path,
    programs: Sequence[EncodedProgram],
    rewrite: Callable[[Sequence[EncodedProgram]], Manifest],
    fresh: FreshProcess,
    eager: EagerErrors,
) -> tuple[list[EncodedProgram], list[Comparison]]:
    """Compare a written bundle with its recorded calls, by the functional graphs and by the forward graphs.

    A functional graph that disagrees is dropped, with the reason in the program's record, or restricted to the sizes
    for which it agrees. The forward graph, the program's meaning, must agree (`VerificationFailed`); only sizes of 0
    and 1 may disagree, and the program then refuses them. `rewrite` writes programs and manifest to the directory.

    Returns the programs, possibly without some functional graphs or sizes, and every comparison of the remaining ones.
    """
    results = _run(directory, rewrite(programs).requirements, fresh=fresh)
    # The backward of these is in no forward graph.
    joint = [p.record.name for p in programs if p.record.grad and not p.record.forward.differentiable]
    results = [r for r in results if r.program not in joint or r.target != "autograd"]
    results = eager.judged(results, lambda: rewrite(programs))
    if wrong := _wrong(programs, results):
        programs = without_small_sizes(directory, programs, wrong, results)
        refused = beyond_ranges(directory, programs)
        results = [r for r in results if (r.program, r.vector) not in refused]
    if wrong := _wrong(programs, results):
        report = failures(result for result in results if result.program in wrong)
        way_out = small_sizes(directory, wrong, results)
        headline = "the bundle disagrees with eager execution; nothing was written"
        if way_out is not None:
            report, headline = report[:8], f"{way_out}. Nothing was written; the calls disagreed with eager execution"
        raise VerificationFailed("\n".join([f"{headline}:", *report[:40]]), report)
    used: list[VectorResult] = []
    served: list[EncodedProgram] = []
    for program in programs:
        forward, functional = (_own(results, program, target) for target in TARGETS)
        if _verdict(program, results) == "functional":
            served.append(program)
            used += functional
            continue
        larger = with_functional_of_larger_sizes(directory, program, functional)
        served.append(larger or program.without_functional(_disagreement(functional)))
        used += forward
    return served, [comparison for result in used for comparison in comparisons(result)]


def _own(results: list[VectorResult], program: EncodedProgram, target: str) -> list[VectorResult]:
    return [r for r in results if (r.program, r.target) == (program.record.name, target)]


def _wrong(programs: Sequence[EncodedProgram], results: list[VectorResult]) -> list[str]:
    return [program.record.name for program in programs if _verdict(program, results) == "wrong"]


def verify_targets(
    directory: Path,
    programs: Sequence[EncodedProgram],
    levels: Sequence[Level],
    rewrite: Callable[[Sequence[EncodedProgram]], Manifest],
    eager: EagerErrors,
) -> tuple[list[EncodedProgram], list[Comparison]]:
    """Compare compiled programs with their recorded calls, for each level that this machine has.

    A program that disagrees is dropped from the target, with the reason in the target's record. Arguments are those of
    `verify_bundle`. Returns the programs, possibly with fewer targets, and every comparison of the remaining ones.
    """
    found: list[Comparison] = []
    for level in levels:
        manifest = rewrite(programs)
        having = [program.record.name for program in programs if level.target in program.compiled]
        target = open_bundle(directory, check_digests=False).target(level.target)
        if not having or unfit(target.requirements) is not None:
            continue
        results = _run(directory, manifest.requirements, [level.target])
        own = [result for result in results if result.program in having]
        results = eager.judged(own, functools.partial(rewrite, programs))
        wrong = {result.program: result for result in reversed(results) if not result.agrees}
        for name, result in wrong.items():
            target = without_program(target, name, _disagreement([result]))
        write_target(target, directory)
        programs = [
            dataclasses.replace(program, compiled=tuple(t for t in program.compiled if t != level.target))
            if program.record.name in wrong
            else program
            for program in programs
        ]
        found += [c for result in results if result.program not in wrong for c in comparisons(result)]
    return list(programs), found


def _verdict(program: EncodedProgram, results: list[VectorResult]) -> Literal["functional", "forward", "wrong"]:
    """Return the graph that serves the program; the forward one must agree, for calls that the other does not."""
    record = program.record
    forward, functional = (all(r.agrees for r in _own(results, program, target)) for target in TARGETS)
    if forward and functional:
        return "functional"
    return "forward" if forward and record.functional is not None and record.forward.differentiable else "wrong"


def _run(
    directory: Path, requirements: Requirements, targets: Sequence[str] = TARGETS, fresh: FreshProcess | None = None
) -> list[VectorResult]:
    """Run the self-test, in a fresh process unless custom operators exist only in this one (`__main__`)."""
    namespaces, modules = requirements.operator_namespaces, requirements.operator_modules
    types = requirements.tensor_types
    unnamed = any(name.startswith("__main__:") or "<locals>" in name for name in types)
    if unnamed or (namespaces and (not modules or "__main__" in modules)):
        from aotexport.values.subclasses import CLASSES
        from aotexport_runtime.commands.self_test import run_vectors

        own = {name: CLASSES[name] for name in types}
        given = {"operator_namespaces": namespaces, "tensor_types": own, "trust": "native", "mapped": True}
        return [result for target in targets for result in run_vectors(directory, target=target, **given)]
    # Nobody else knows the directory that is being written.
    options = [*allowing(modules, namespaces, types), "--trust", "native", "--mapped"]
    return run_selftest(directory, targets, options, fresh)


def allowing(modules: Iterable[str], namespaces: Iterable[str], types: Iterable[str]) -> list[str]:
    """Return the options of a self-test that import modules, and allow operators and classes of tensors."""
    given = {"--import": modules, "--operator-namespace": namespaces, "--tensor-type": types}
    return [argument for option, names in given.items() for name in names for argument in (option, name)]


def run_selftest(
    directory: Path, targets: Sequence[str], options: Sequence[str] = (), fresh: FreshProcess | None = None
) -> list[VectorResult]:
    """Run the bundle's self-test in a fresh process that has only the runtime; return its results."""
    arguments = ["selftest", str(directory), "--json", *options]
    for target in targets:
        arguments += ["--target", target]
    # The process finds the bundle's own modules on the path of this one.
    own = "--import" in options or "--tensor-type" in options
    path = [os.path.abspath(place) for place in sys.path] if own else []
    with fresh or FreshProcess() as process:
        done = process.run(arguments, TIMEOUT_S, path)
    return printed(done, list[VectorResult], "fresh process that verifies the bundle")


def _disagreement(results: list[VectorResult]) -> str:
    first = next((line.split(": ", 1)[1] for line in failures(results)), "")
    return f"it disagreed with eager execution when it was verified: {first}"[:300]
