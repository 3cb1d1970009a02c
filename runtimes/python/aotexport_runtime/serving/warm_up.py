"""The proof that a program of torch is ready: eager's answers to the recorded calls."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from aotexport_runtime.bundle.read import Bundle
from aotexport_runtime.commands.self_test import (
    VectorResult,
    describe_failures,
    observe_vector,
    read_vector,
    recorded_observation,
    rounding,
)
from aotexport_runtime.errors import NotSupported, SelfTestFailed
from aotexport_runtime.serving.joining import Values
from aotexport_runtime.values.compare import compare
from aotexport_runtime.values.observe import make_inputs

if TYPE_CHECKING:
    from aotexport_runtime.serving.program import ServedProgram


def check_recorded_calls(bundle: Bundle, program: ServedProgram) -> list[Values]:
    """Run the recorded calls of the program and its variants; return their arguments.

    Args:
        bundle: an open bundle.
        program: its program; gradients of its state are dropped.

    Raises:
        SelfTestFailed: an answer differs from eager's; the message lists the differences.
        NotSupported: a call changes the module's state.
    """
    recorded: list[Values] = []
    failures: list[str] = []
    before = _versions(program)
    for entry in bundle.manifest.testvectors:
        if entry.program not in program.variants:
            continue
        vector, stored = read_vector(bundle, entry)
        got = observe_vector(program.module, vector, stored)
        program.module.zero_grad()
        _check_unchanged(program, before)
        least = 0.0 if program.target in ("portable", "autograd") else rounding(bundle, entry.program)
        expected = recorded_observation(vector, stored)
        differences = compare(expected, got, least=least, eager_errors=vector.eager_errors)
        failures += describe_failures(VectorResult(entry.program, entry.name, program.target, differences))
        recorded.append(make_inputs(vector.inputs, stored, program.module.device, program.module.form).values)
    program.module.eval()
    if failures:
        raise SelfTestFailed("the bundle disagrees with eager execution:\n" + "\n".join(failures))
    return recorded


def recorded_values(bundle: Bundle, program: ServedProgram) -> Values | None:
    """Return the arguments of the first recorded call of the program or a variant; None: there is none."""
    entry = next((entry for entry in bundle.manifest.testvectors if entry.program in program.variants), None)
    if entry is None:
        return None
    vector, stored = read_vector(bundle, entry)
    return make_inputs(vector.inputs, stored, program.module.device, program.module.form).values


def _check_unchanged(program: ServedProgram, before: Mapping[str, tuple[int, int]]) -> None:
    changed = [name for name, version in _versions(program).items() if version != before[name]]
    changed += [attribute.name for attribute in program.module.bundle.manifest.attributes]
    if changed:
        raise NotSupported(
            f"calls of program `{program.name}` change the module's {', '.join(f'`{name}`' for name in changed)}, and "
            "what one client is answered would depend on the calls of others. Let the model's `forward` take this "
            "state and return it, and export again"
        )


def _versions(program: ServedProgram) -> dict[str, tuple[int, int]]:
    return {name: (id(tensor), tensor._version) for name, tensor in program.module.state_tensors().items()}
