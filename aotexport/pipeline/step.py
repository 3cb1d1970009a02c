"""Add the program of a whole training step to captured ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import msgspec

from aotexport.capture.functional.step import step_spec
from aotexport.capture.programs.forward_graphs import ForwardGraphs
from aotexport.encode.program import EncodedProgram
from aotexport.errors import ModelFileInvalid
from aotexport.model.programs import ProgramSpec
from aotexport.model.step import Step
from aotexport.state.mode import in_mode
from aotexport_runtime.schema.manifest import STEP


def capture_step(
    specs: list[ProgramSpec],
    programs: list[EncodedProgram],
    capture: Callable[..., EncodedProgram],
    graphs: ForwardGraphs,
    step: Step,
) -> tuple[list[ProgramSpec], list[EncodedProgram]]:
    """Return captured programs and their specs, with that of a training step, made of the one that trains.

    Raises:
        ExportFailed: it cannot be captured; says why.
        ModelFileInvalid: there is no program that trains, or one that has the name of the step.
    """
    if taken := next((spec for spec in specs if STEP in (spec.name, spec.method)), None):
        raise ModelFileInvalid(
            f"step: program `{taken.name}` is of the method `{taken.method}`, and the training step is program and "
            f"method `{STEP}`; name yours otherwise"
        )
    train = next(
        (s for s in specs if (s.mode, s.grad, s.method, s.variant_of) == ("train", True, "forward", None)), None
    )
    if train is None:
        raise ModelFileInvalid("step: it is made of the program `train`, which is not among the programs")
    forward = graphs.capture(train)
    with in_mode(train.call.module, train.mode, train.call.first_call_constants):
        spec, optimizer = step_spec(train, forward, step)
    program = capture(spec)
    # Autocast would cast for nodes of backward and of updates too.
    fixed = tuple(sorted({*program.record.fixed, "autocast"}))
    record = msgspec.structs.replace(program.record, fixed=fixed)
    return [*specs, spec], [*programs, replace(program, record=record, optimizer=optimizer)]
