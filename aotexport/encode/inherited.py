"""Limits that a program inherits from the bundle that it was captured from: a trace of its graph does not see them."""

from __future__ import annotations

import itertools
from dataclasses import replace

import msgspec

from aotexport.encode.program import EncodedProgram
from aotexport.model.ancestry import loaded_in
from aotexport.model.call import ExampleCall
from aotexport_runtime.module.bundle_module import BundleModule
from aotexport_runtime.module.cast import CastBundle
from aotexport_runtime.schema.program import InputSpec, Program, Question, SizeInput, StateInput

_OF_CODE = ("branch", "number", "integer")
"""Kinds of notes on what the model's code depends on."""


def with_inherited(program: EncodedProgram, call: ExampleCall) -> EncodedProgram:
    """Return the program with what its loaded bundles' programs of the same mode are fixed to, and their notes."""
    record = program.record
    for path, module in loaded_in(call):
        for own in _programs(module, record):
            fixed = tuple(sorted({*record.fixed, *own.fixed}))
            # Notes on sizes are about ranges that the user declared then, and others than these about the program.
            kinds = _OF_CODE if own.name != record.name else (*_OF_CODE, "other")
            # They name arguments of the whole.
            notes = () if path else tuple(note for note in own.notes if note.kind in kinds)
            asked = [_inherited(question, own, path, record) for question in own.questions]
            record = msgspec.structs.replace(
                record,
                fixed=fixed,
                questions=tuple(dict.fromkeys(itertools.chain(record.questions, *asked))),
                notes=tuple(dict.fromkeys((*record.notes, *notes))),
            )
    return replace(program, record=record)


def _inherited(question: Question, own: Program, path: str, record: Program) -> list[Question]:
    """Return the question of a loaded program, at `path` in the whole, for the inputs of the whole's program."""
    wanted = [_named(own.inputs[index], path) for index in question.inputs]
    indices = {_named(spec, ""): index for index, spec in enumerate(record.inputs)}
    if indices.keys() >= set(wanted):
        return [msgspec.structs.replace(question, inputs=tuple(indices[each] for each in wanted))]
    # What the whole computed its arguments from is not known.
    return [
        Question(inputs=(index,), requires_grad=spec.meta.requires_grad, recording=question.recording)
        for index, spec in enumerate(record.inputs)
        if not isinstance(spec, SizeInput) and spec.meta.dtype.startswith(("float", "bfloat", "complex"))
    ]


def _named(spec: InputSpec, path: str) -> tuple[str, str]:
    """Return the name of a state input in the whole, or the path of an argument."""
    if not isinstance(spec, StateInput):
        return "", "" if path else spec.path
    return f"{path}.{spec.name}" if path else spec.name, ""


def without_refused(program: EncodedProgram, call: ExampleCall) -> EncodedProgram:
    """Return the program without its functional graph where the one that it was captured from has none either."""
    if program.record.functional is None:
        return program
    kind = "joint" if program.record.grad else "inference"
    reasons = [
        refusal.reason
        for _, module in loaded_in(call)
        for own in _programs(module, program.record)
        for refusal in own.refusals
        if own.functional is None and refusal.graph == kind
    ]
    return program.without_functional(reasons[0]) if reasons else program


def _programs(module: BundleModule, like: Program) -> list[Program]:
    """Return the programs of a loaded bundle that a call in the mode of another program may run."""
    bundle = module.bundle.original if isinstance(module.bundle, CastBundle) else module.bundle
    found = [bundle.program(name) for name in bundle.program_names]
    found = [own for own in found if own.mode in (like.mode, "function")]
    alike = [own for own in found if own.grad == like.grad]
    same = [own for own in alike if own.name == like.name]
    return same or alike or found
