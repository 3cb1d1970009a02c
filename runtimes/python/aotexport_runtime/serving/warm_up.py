"""The proof that a servable is ready: eager's answers to the recorded calls, and to calls that are joined."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from aotexport_runtime.bundle.read import Bundle
from aotexport_runtime.commands.self_test import (
    VectorResult,
    describe_failures,
    observe_vector,
    read_vector,
    recorded_observation,
    rounding,
)
from aotexport_runtime.errors import AotExportError, NotSupported, SelfTestFailed
from aotexport_runtime.serving.interface import BatchAxes
from aotexport_runtime.serving.program import ServedProgram, Values
from aotexport_runtime.values.compare import compare
from aotexport_runtime.values.observe import Observation, make_inputs

log = logging.getLogger("aotexport_runtime")


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


def proven_batch(program: ServedProgram, recorded: Sequence[Values]) -> BatchAxes | None:
    """Return the first axes along which joined calls give what each gives alone; None: there are none.

    Sizes tell where calls could be joined; only the values tell whether rows of a batch know of each other, as those of
    a sequence do.

    Args:
        program: the program.
        recorded: arguments of its recorded calls.
    """
    for axes in program.interface.batches:
        pairs = [pair for values in recorded for pair in _pairs(values, axes)]
        verdicts = [verdict for pair in pairs if (verdict := _agrees(program, pair, axes)) is not None]
        if verdicts and all(verdicts):
            return axes
        log.info(
            "program %s: calls are not joined along `%s`: %s",
            program.name,
            axes.name,
            "answers would differ" if verdicts else "no recorded calls show whether answers would differ",
        )
    return None


def _pairs(values: Values, axes: BatchAxes) -> list[tuple[Values, Values]]:
    """Return two calls each that differ: a recorded one and its mirror image, and the two parts of its batch."""
    if not all(isinstance(value, torch.Tensor) for value in values):
        return []
    mirrored = [_mirrored(value, axis) for value, axis in zip(values, axes.inputs, strict=True)]
    pairs = [(values, mirrored)]
    if values[0].shape[axes.inputs[0]] > 1:
        parts = [_parts(value, axis) for value, axis in zip(values, axes.inputs, strict=True)]
        pairs.append(([head for head, _ in parts], [tail for _, tail in parts]))
    return [(one, other) for one, other in pairs if not _same(one, other)]


def _mirrored(tensor: torch.Tensor, axis: int) -> torch.Tensor:
    """Return a tensor with its axes but `axis` reversed, and floats halved, so that sums differ as well."""
    mirrored = tensor.flip([other for other in range(tensor.dim()) if other != axis])
    return mirrored / 2 if tensor.is_floating_point() else mirrored


def _parts(tensor: torch.Tensor, axis: int) -> tuple[torch.Tensor, torch.Tensor]:
    return tensor.narrow(axis, 0, 1), tensor.narrow(axis, 1, tensor.shape[axis] - 1)


def _same(one: Values, other: Values) -> bool:
    return all(a.shape == b.shape and torch.equal(a, b) for a, b in zip(one, other, strict=True))


def _agrees(program: ServedProgram, pair: tuple[Values, Values], axes: BatchAxes) -> bool | None:
    """Return whether two calls have the answers that they have when they are joined; None: a call does not fit."""
    try:
        alone = [program.run(_copied(values)) for values in pair]
        joined = program.run_joined(pair, axes)
    except (AotExportError, RuntimeError, IndexError) as error:
        log.debug("program %s: no verdict on joined calls: %s", program.name, error)
        return None
    return all(
        difference.agrees
        for expected, got in zip(alone, joined, strict=True)
        for difference in compare(_observation(expected), _observation(got))
    )


def _copied(values: Values) -> Values:
    """Return copies, which the model may write to."""
    return [value.clone() for value in values]


def _observation(outputs: Sequence[Any]) -> Observation:
    values = {str(index): value.detach().cpu().reshape(-1) for index, value in enumerate(outputs)}
    facts = {str(index): f"{value.dtype}{list(value.shape)}" for index, value in enumerate(outputs)}
    return Observation(facts, values)
