"""The optimizer of a program `step`, as a bundle describes it, and the state that steps keep for it. No torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeGuard

import msgspec

from aotexport_runtime.errors import ArgumentInvalid, NotSupported
from aotexport_runtime.schema.manifest import OPTIMIZER, Manifest
from aotexport_runtime.schema.program import ArgumentInput, InputSpec, Program, StateInput

FORMS = ("foreach", "fused", "capturable", "differentiable")
"""Options of torch's optimizers that choose among forms of one computation, and may be any."""

COUNT, MAX_NORM, SEED, SCALE = (f"optimizer['{name}']" for name in ("count", "max_norm", "seed", "scale"))
"""Paths of the number of steps, of the norm to clip gradients to, of what ONNX models draw random numbers by, and of
what the loss is multiplied by where gradients are added up."""
GRADS = "grads"
"""Name of the gradients that are added up."""


class Group(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A group of the optimizer: names of its parameters, options as torch has them, and what state begins as, by name.

    Not every parameter has every state.
    """

    parameters: list[str]
    options: dict[str, bool | int | float | str | list[float | None] | None]
    state: dict[str, float]


class Optimizer(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The extension of a manifest with a program `step`: its optimizer.

    Attributes:
        optimizer: name of its class in `torch.optim`, or of another with its module, `module:Class`.
        clip: whether it clips gradients by their norm.
        accumulate: whether it adds gradients that were there before.
        outputs: patterns of names of the results that it returns beside the loss.
        updates: the parameters that it updates, in the order of their state.
        groups: its groups, also of parameters that take no gradient.
    """

    optimizer: str
    clip: bool
    accumulate: bool
    outputs: str
    updates: list[str]
    groups: list[Group]

    def rates(self, lr: float | Sequence[float] | None, max_norm: float | None) -> tuple[list[float], float]:
        """Return a learning rate per group, and the norm to clip gradients to; None: those of the export, no norm.

        Raises:
            ArgumentInvalid: another number of rates than of groups.
            NotSupported: the program does not clip.
        """
        own: list[Any] = [group.options["lr"] for group in self.groups]
        rates: list[Any] = own if lr is None else [lr] * len(own) if isinstance(lr, int | float) else list(lr)
        if len(rates) != len(own):
            raise ArgumentInvalid(f"`lr`: the optimizer has {len(own)} groups of parameters, got {len(rates)} rates")
        if max_norm not in (None, math.inf) and not self.clip:
            raise NotSupported(
                "the program does not clip gradients: give no `max_norm` (`--clip 0`), or export it with `clip=True`"
            )
        return rates, math.inf if max_norm is None else max_norm


class Held(NamedTuple):
    """A tensor of the argument `optimizer`: a number, or of a parameter its state of a name, or its gradient."""

    dtype: str
    shape: tuple[int, ...]
    initial: float
    parameter: str = ""
    name: str = ""


def optimizer_of(manifest: Manifest) -> Optimizer:
    """Return the optimizer of a bundle.

    Raises:
        NotSupported: the bundle has no whole training step, or its extension is malformed.
    """
    if OPTIMIZER not in manifest.extensions:
        raise NotSupported(
            "the bundle has no whole training step: add it with `aotexport derive BUNDLE -o OUT --step adamw`"
        )
    try:
        found = msgspec.convert(manifest.extensions[OPTIMIZER], Optimizer)
        names = [name for group in found.groups for name in group.parameters]
        if not all(isinstance(group.options.get("lr"), int | float) for group in found.groups):
            raise ValueError("a group has no `lr`")
        if len(set(names)) < len(names) or not {*found.updates} <= {*names} or not found.updates:
            raise ValueError("its groups do not have the parameters that it updates")
    except (msgspec.ValidationError, ValueError) as error:
        raise NotSupported(f"the bundle's extension `{OPTIMIZER}` is malformed: {error}") from None
    parameters = {entry.name for entry in manifest.state if entry.role == "parameter"}
    if unknown := [name for name in names if name not in parameters]:
        raise NotSupported(f"the bundle's extension `{OPTIMIZER}` names `{unknown[0]}`, which is no parameter")
    return found


def state_of(optimizer: Optimizer, manifest: Manifest, program: Program) -> dict[str, Held]:
    """Return the tensors of the argument `optimizer` of a program `step`, by path.

    `NotSupported`: the program takes others than the extension says, or they are larger than what the bundle stores.
    """
    groups = {name: group for group in optimizer.groups for name in group.parameters}
    entries = {entry.name: entry for entry in manifest.state}
    taken = {spec.path: spec.meta for spec in program.inputs if _is_of_optimizer(spec)}
    numbers = {COUNT: 0.0} | {f"optimizer['lr'][{index}]": 0.0 for index in range(len(optimizer.groups))}
    numbers |= {MAX_NORM: 0.0} if optimizer.clip else {}
    numbers |= {SCALE: 0.0} if optimizer.accumulate else {}
    found = {path: Held("float64", (), value) for path, value in numbers.items()}
    if SEED in taken:
        found[SEED] = Held("int64", (), 0.0)
    for index, parameter in enumerate(optimizer.updates):
        entry = entries[parameter]
        if optimizer.accumulate:
            found[f"optimizer['{GRADS}'][{index}]"] = Held(entry.dtype, entry.shape, 0.0, parameter, GRADS)
        for name, initial in groups[parameter].state.items():
            meta = taken.get(path := f"optimizer['state'][{index}]['{name}']")
            if meta is not None and math.prod(meta.shape) <= math.prod(entry.shape):  # type: ignore[arg-type]
                found[path] = Held(meta.dtype, meta.shape, initial, parameter, name)  # type: ignore[arg-type]
    nbytes = sum(file.nbytes for file in manifest.files)
    if sum(math.prod(entries[parameter].shape) for parameter in optimizer.updates) > nbytes:
        raise NotSupported(f"the parameters of the bundle's extension `{OPTIMIZER}` are larger than its files")
    kinds = {path: (held.dtype, held.shape) for path, held in found.items()}
    if kinds != {path: (meta.dtype, meta.shape) for path, meta in taken.items()}:
        raise NotSupported(f"the bundle's extension `{OPTIMIZER}` does not fit the state that its program takes")
    return found


def holding(program: Program) -> Program:
    """Return a program `step` as one that reads the optimizer's state by itself, as it reads the module's."""
    inputs = [StateInput(name=spec.path, meta=spec.meta) if _is_of_optimizer(spec) else spec for spec in program.inputs]
    own = tuple(parameter for parameter in program.parameters if parameter.name != "optimizer")
    return msgspec.structs.replace(program, inputs=tuple(inputs), parameters=own)


def _is_of_optimizer(spec: InputSpec) -> TypeGuard[ArgumentInput]:
    return isinstance(spec, ArgumentInput) and spec.path.startswith("optimizer[")
