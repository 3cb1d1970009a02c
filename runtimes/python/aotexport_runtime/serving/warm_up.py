"""The proof that a program of torch is ready: eager's answers to the recorded calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from aotexport_runtime.adapters.base import checksum
from aotexport_runtime.bundle.read import Bundle
from aotexport_runtime.commands.results import VectorResult, describe_failures
from aotexport_runtime.commands.self_test import least_tolerance, observe_vector
from aotexport_runtime.errors import NotSupported, SelfTestFailed
from aotexport_runtime.module.bundle_module import BundleModule
from aotexport_runtime.module.recorded import read_vector, recorded_observation
from aotexport_runtime.serving.joining import Values
from aotexport_runtime.values.compare import compare
from aotexport_runtime.values.observe import make_inputs


def check_recorded_calls(bundle: Bundle, module: BundleModule, names: Sequence[str], target: str) -> list[Values]:
    """Run the recorded calls of a program and its variants; return their arguments.

    Args:
        bundle: an open bundle.
        module: loaded from it; gradients of its state are dropped.
        names: of the program and its variants.
        target: engine that was asked for.

    Raises:
        SelfTestFailed: an answer differs from eager's; the message lists the differences.
        NotSupported: a call changes the module's state.
    """
    recorded: list[Values] = []
    failures: list[str] = []
    before, sums = _versions(module), _sums(module)
    for entry in bundle.manifest.testvectors:
        if entry.program not in names:
            continue
        vector, stored = read_vector(bundle, entry)
        got = observe_vector(module, vector, stored)
        module.zero_grad()
        _check_unchanged(module, names[0], before, _versions(module))
        least = least_tolerance(bundle, entry.program, exact=target in ("portable", "autograd"))
        expected = recorded_observation(vector, stored)
        differences = compare(expected, got, least=least, eager_errors=vector.eager_errors)
        failures += describe_failures(VectorResult(entry.program, entry.name, target, differences))
        recorded.append(make_inputs(vector.inputs, stored, module.device, module.form).values)
    # Batch norm raises no version.
    _check_unchanged(module, names[0], sums, _sums(module))
    module.eval()
    if failures:
        raise SelfTestFailed("the bundle disagrees with eager execution:\n" + "\n".join(failures))
    return recorded


def recorded_values(bundle: Bundle, module: BundleModule, names: Sequence[str]) -> Values | None:
    """Return the arguments of the first recorded call of a program or its variants; None: there is none."""
    entry = next((entry for entry in bundle.manifest.testvectors if entry.program in names), None)
    if entry is None:
        return None
    vector, stored = read_vector(bundle, entry)
    return make_inputs(vector.inputs, stored, module.device, module.form).values


def _check_unchanged(module: BundleModule, program: str, before: Mapping[str, Any], after: Mapping[str, Any]) -> None:
    changed = [name for name, state in after.items() if state != before[name]]
    changed += [attribute.name for attribute in module.bundle.manifest.attributes]
    if changed:
        raise NotSupported(
            f"calls of program `{program}` change the module's {', '.join(f'`{name}`' for name in changed)}, and "
            "what one client is answered would depend on the calls of others. Let the model's `forward` take this "
            "state and return it, and export again"
        )


def _versions(module: BundleModule) -> dict[str, tuple[int, int]]:
    return {name: (id(tensor), tensor._version) for name, tensor in module.state_tensors().items()}


def _sums(module: BundleModule) -> dict[str, int]:
    return {name: checksum(tensor) for name, tensor in module.state_tensors().items()}
