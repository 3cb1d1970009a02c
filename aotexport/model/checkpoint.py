"""Weights of a checkpoint, mapped into a module that was made without memory for its own."""

from __future__ import annotations

import contextlib
import difflib
import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from aotexport.errors import ModelFileInvalid
from aotexport.process.patches import Patch, patched

_INDEX = "*.safetensors.index.json"
_SHOWN = 3


def parameters_without_memory() -> contextlib.AbstractContextManager[None]:
    """Make parameters of modules on the meta device; buffers keep their values."""
    register = nn.Module.register_parameter

    def register_parameter(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        register(self, name, param)
        if type(param) is nn.Parameter and not param.is_meta:
            self._parameters[name] = nn.Parameter(param.detach().to("meta"), param.requires_grad)

    return patched(
        Patch(nn.Module, "register_parameter", register_parameter, "Make parameters that a checkpoint fills")
    )


def give_weights(module: nn.Module, where: Path) -> None:
    """Put the tensors of a checkpoint in the place of parameters and persistent buffers.

    `where` is a safetensors file, or a directory of them, of which an index names those to read; they may hold further
    tensors, and one of the names of a parameter that has several. Parameters may be on the meta device.
    `ModelFileInvalid`: the files lack a tensor, or have it in another shape or dtype.
    """
    files = _open(where)
    missing: list[str] = []
    for names, slots in _slots(module):
        table, key = slots[0]
        old = table[key]
        given = next((name for name in names if name in files), None)
        if given is not None:
            new = _fitting(files[given].get_tensor(given), old, given, where)
            new = nn.Parameter(new, old.requires_grad) if isinstance(old, nn.Parameter) else new
            for table, key in slots:
                table[key] = new
        elif isinstance(old, nn.Parameter) or old.is_meta or names[0] in module.state_dict(keep_vars=True):
            missing.append(names[0])
    if missing:
        near = difflib.get_close_matches(missing[0], files, n=_SHOWN, cutoff=0) or list(files)[:_SHOWN]
        more = f" and {len(missing) - 1} others" if len(missing) > 1 else ""
        raise ModelFileInvalid(f"`{where}` has no `{missing[0]}`{more}; it has {', '.join(near)}")


def _open(where: Path) -> dict[str, Any]:
    paths = [where]
    if where.is_dir():
        indices = sorted(where.glob(_INDEX))
        paths = sorted(where.glob("*.safetensors"))
        if len(indices) == 1:
            paths = [where / name for name in sorted(set(json.loads(indices[0].read_bytes())["weight_map"].values()))]
    found: dict[str, Any] = {}
    for path in paths:
        try:
            file: Any = safe_open(path, framework="pt")
        except (SafetensorError, OSError) as error:
            raise ModelFileInvalid(f"`{path}` is no safetensors file: {error}") from None
        for name in file.keys():  # noqa: SIM118 - no mapping
            if name in found:
                raise ModelFileInvalid(f"several files of `{where}` have `{name}`; name the file to read")
            found[name] = file
    if not found:
        raise ModelFileInvalid(f"`{where}` has no safetensors files with tensors")
    return found


def _slots(module: nn.Module) -> list[tuple[list[str], list[tuple[dict[str, Any], str]]]]:
    """Return the names of each parameter and buffer, with the tables and keys that it stands under."""
    found: dict[int, tuple[list[str], list[tuple[dict[str, Any], str]]]] = {}
    for path, child in module.named_modules(remove_duplicate=False):
        for table in (child._parameters, child._buffers):
            for key, tensor in table.items():
                if tensor is not None:
                    names, slots = found.setdefault(id(tensor), ([], []))
                    names.append(f"{path}.{key}" if path else key)
                    slots.append((table, key))
    return list(found.values())


def _fitting(new: torch.Tensor, old: torch.Tensor, name: str, where: Path) -> torch.Tensor:
    for kind, has, wanted in (("shape", list(new.shape), list(old.shape)), ("dtype", new.dtype, old.dtype)):
        if has != wanted:
            raise ModelFileInvalid(f"`{name}` is of {kind} {has} in `{where}`, and of {wanted} in the model")
    return new
