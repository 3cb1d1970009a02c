"""Checkpoints of a run: one file of safetensors, exchanged in one step; a crash leaves the old one or the new one."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Annotated, Any

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from aotexport_runtime.bundle.directory import at_descriptor, open_regular
from aotexport_runtime.errors import DataInvalid, NotWritten
from aotexport_runtime.finetune.settings import Settings
from aotexport_runtime.module.bundle_module import BundleModule

FILE, BEST = "checkpoint.safetensors", "best.safetensors"
"""That of a run that goes on, and that of its best epoch."""
_MODEL, _OPTIMIZER = "model.", "optimizer."
_KEY = "aotexport_run"


class Identity(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a checkpoint belongs to: settings, digest of the bundle's manifest, number of examples."""

    settings: dict[str, Any]
    base: str
    examples: int

    @staticmethod
    def of(module: BundleModule, settings: Settings, examples: int) -> Identity:
        """Return that of a run on a bundle as it was loaded."""
        return Identity(msgspec.json.decode(msgspec.json.encode(settings)), module.bundle.manifest_sha256, examples)

    def check(self, other: Identity, path: Path) -> None:
        """Refuse the checkpoint of another run; `DataInvalid`: it is of another one; names what differs."""
        for key, value in self.settings.items():
            if other.settings.get(key) != value:
                raise DataInvalid(
                    f"--resume: the run in {path} has {key} {other.settings.get(key)!r:.100}, and this one {value!r}. "
                    "Give the same options, or begin anew (--force)"
                )
        if other.base != self.base or other.examples != self.examples:
            what = "another bundle" if other.base != self.base else "other data"
            raise DataInvalid(f"--resume: the run in {path} is of {what}. Begin anew (--force)")


class _Record(Identity, frozen=True, forbid_unknown_fields=True):
    step: Annotated[int, msgspec.Meta(ge=0)]


def trained(module: BundleModule) -> dict[str, torch.nn.Parameter]:
    """Return the parameters that a run trains, by name."""
    return {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}


def write(path: Path, module: BundleModule, optimizer: torch.optim.Optimizer, identity: Identity, step: int) -> None:
    """Write a checkpoint after `step` steps; `NotWritten`: the file system refuses; the checkpoint before it stays."""
    names = list(_updated(module, optimizer))
    tensors = {_MODEL + name: tensor for name, tensor in _state(module).items()}
    for index, state in optimizer.state_dict()["state"].items():
        tensors.update({f"{_OPTIMIZER}{names[index]}/{key}": value for key, value in state.items()})
    stored = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    record = _Record(identity.settings, identity.base, identity.examples, step)
    beside = path.with_suffix(".new")
    try:
        beside.unlink(missing_ok=True)  # A link would lead elsewhere.
        save_file(stored, beside, metadata={_KEY: msgspec.json.encode(record).decode()})
        with beside.open("rb") as file:
            os.fsync(file.fileno())
        beside.replace(path)
    except (OSError, SafetensorError) as error:
        with contextlib.suppress(OSError):
            beside.unlink(missing_ok=True)
        number = getattr(error, "errno", None) or 0
        raise NotWritten(f"the checkpoint {path} cannot be written: {error}. The one before it stays", number) from None


def read(path: Path, module: BundleModule, optimizer: torch.optim.Optimizer, identity: Identity, steps: int) -> int:
    """Put a run back to where it was; return the number of its steps, of `steps`.

    `DataInvalid`: there is no checkpoint, or one of another run, or what it holds is not what such a run has. Nothing
    has changed then.
    """
    try:
        with open_regular(path) as stream, safe_open(at_descriptor(stream.fileno(), path), "pt") as file:
            record = msgspec.json.decode(file.metadata()[_KEY], type=_Record)
            identity.check(record, path)
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is no mapping
    except FileNotFoundError:
        raise DataInvalid(f"--resume: there is no checkpoint {path}; begin anew without it") from None
    except (OSError, SafetensorError, KeyError, TypeError, ValueError, RuntimeError) as error:
        raise DataInvalid(f"--resume: {path} is no checkpoint of this command: {error}") from None
    _check(tensors, record.step, module, optimizer, steps, path)
    own = _state(module)
    with torch.no_grad():
        for name, tensor in own.items():
            tensor.copy_(tensors[_MODEL + name])
    states: dict[int, dict[str, torch.Tensor]] = {}
    for index, name in enumerate(_updated(module, optimizer)):
        prefix = f"{_OPTIMIZER}{name}/"
        found = {place.removeprefix(prefix): tensor for place, tensor in tensors.items() if place.startswith(prefix)}
        if found:
            states[index] = found
    optimizer.load_state_dict({**optimizer.state_dict(), "state": states})
    return record.step


def _updated(module: BundleModule, optimizer: torch.optim.Optimizer) -> dict[str, torch.nn.Parameter]:
    """Return the parameters that are trained, by name, in the order of the optimizer's groups."""
    names = {id(parameter): name for name, parameter in trained(module).items()}
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return {names[id(parameter)]: parameter for parameter in parameters}


def _check(
    tensors: dict[str, torch.Tensor],
    step: int,
    module: BundleModule,
    optimizer: torch.optim.Optimizer,
    steps: int,
    path: Path,
) -> None:
    """Refuse tensors that are not those of the run, before any is copied."""
    needed = {_MODEL + name: tensor for name, tensor in _state(module).items()}
    for name, parameter in _updated(module, optimizer).items():
        if any(key.startswith(f"{_OPTIMIZER}{name}/") for key in tensors):  # Others had no gradient yet.
            # A stepper has its state from the beginning.
            own = optimizer.state.get(parameter) or {"exp_avg": parameter, "exp_avg_sq": parameter}
            own = {**own, "step": torch.empty((), dtype=torch.float32)}
            needed |= {f"{_OPTIMIZER}{name}/{key}": tensor for key, tensor in own.items()}
    wrong = [f"it is at step {step} of {steps}"] if step > steps else []
    for key in sorted(needed.keys() | tensors.keys()):
        expected, found = _form(needed.get(key)), _form(tensors.get(key))
        if expected != found:
            wrong.append(f"`{key}` is {found}, and the run has {expected}")
        elif key.startswith(_OPTIMIZER) and key.endswith("/step") and not 0 <= tensors[key].item() <= step:
            wrong.append(f"`{key}` is {tensors[key].item()}, and the run is at step {step}")
    if wrong:
        raise DataInvalid(f"--resume: {path} is no checkpoint of this run: {wrong[0]}. Begin anew (--force)")


def _form(tensor: torch.Tensor | None) -> str:
    return "none" if tensor is None else f"{tensor.dtype}{list(tensor.shape)}"


def _state(module: BundleModule) -> dict[str, torch.Tensor]:
    parameters = {id(parameter) for parameter in module.parameters()}
    changing = {name: tensor for name, tensor in module.state_tensors().items() if id(tensor) not in parameters}
    return {**changing, **trained(module)}
