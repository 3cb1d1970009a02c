"""`save`: tuned weights as a new bundle that shares everything else with the loaded one."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import struct
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors.torch import save_file

from aotexport_runtime import schema
from aotexport_runtime.bundle.directory import MANIFEST_NAME
from aotexport_runtime.bundle.read import Bundle
from aotexport_runtime.bundle.staging import staged
from aotexport_runtime.bundle.weights import load_parts, parts_of
from aotexport_runtime.commands.saved_attributes import FILE, SavedAttributes, saved_attributes
from aotexport_runtime.commands.self_test import record_again
from aotexport_runtime.errors import ArgumentInvalid, NotSupported
from aotexport_runtime.module.bundle_module import BundleModule
from aotexport_runtime.module.cast import CastBundle
from aotexport_runtime.schema.manifest import FileEntry, StateTensor, StoredPart
from aotexport_runtime.submodules.adapter import adapters_below
from aotexport_runtime.values import dtypes
from aotexport_runtime.values.arguments import path_of
from aotexport_runtime.values.subclasses import is_wrapper, parts


def save(module: BundleModule, path: str | os.PathLike[str], *, force: bool = False) -> Path:
    """Write the current weights and attributes of `module` as a new bundle at `path`.

    Graphs and programs are hard links to the files of the loaded bundle where the file system allows, else copies.
    The recorded calls are recorded anew, from the forward graphs with the new weights.

    Args:
        module: a loaded bundle.
        path: directory to write, in one step: a crash leaves the old bundle or the new one.
        force: replace a bundle at `path`.

    Returns:
        The directory.

    Raises:
        ArgumentInvalid: `module` is no loaded bundle, or `path` no path.
        NotSupported: `module` was loaded in another dtype, submodules of it were changed, `path` exists, nothing can
            be written there, tensors that are tied in the programs no longer are, a tensor no longer has the dtype or
            shape that the programs were captured with, or an attribute holds a value that a bundle cannot hold.
        NotWritten: the file system is full, read-only, or otherwise refuses.
    """
    _check_module(module)
    if isinstance(module.bundle, CastBundle):
        raise NotSupported(
            f"the module was loaded in {module.bundle.dtype}, and `save` writes the programs that were exported. "
            "Export the loaded module (`aotexport.export(module, ...)`), which captures it in that dtype"
        )
    _check_unchanged(module)
    output = path_of("path", path)
    with staged(output, force=force, refusal=NotSupported) as stage:
        module.check_ties()
        tensors = {name: tensor.detach() for name, tensor in module.state_tensors().items()}
        attributes = saved_attributes(module)
        for entry in attributes.known:
            _check_tensor(entry, tensors[entry.name], module)
        _write(module, tensors, attributes, stage)
    return output.absolute()


def _check_unchanged(module: BundleModule) -> None:
    """Refuse a module with changed submodules, whose code a bundle cannot hold, and one with adapters."""
    needed = (
        f"{path}.{each.tensor}".lstrip(".")
        for path, beside in adapters_below(module).items()
        for each in beside
        if each.is_needed()
    )
    adapted = next(needed, None)
    if adapted is not None:
        raise NotSupported(
            f"`{adapted}` has an adapter, and `save` writes the programs that were exported, with other weights. Merge "
            "the adapter into the weights first (`aotexport_runtime.adapters.merge_adapter`), or write it alone "
            "(`save_adapter`)"
        )
    changed = [change for change in module.changes() if not change.keeps_state]
    if changed:
        listed = ", ".join(f"`{change.path}` {change.how}" for change in changed[:3])
        listed += f" and {len(changed) - 3} more" if len(changed) > 3 else ""
        raise NotSupported(
            f"{listed}, and `save` writes the programs that were exported, with other weights. Export the loaded "
            "module as it is now (`aotexport.export(module, ...)`), which captures it whole"
        )


def _check_module(module: Any) -> None:
    """Refuse a module that is no loaded bundle: only an export makes a bundle of a model."""
    if isinstance(module, BundleModule):
        return
    children = module.named_modules() if isinstance(module, torch.nn.Module) else ()
    inside = next((name for name, child in children if isinstance(child, BundleModule)), None)
    way_out = "To make a bundle of a model, export it (`aotexport.export`)"
    if inside:
        way_out = f"It holds one as `{inside}`: save that one, or export the whole (`aotexport.export`)"
    raise ArgumentInvalid(f"`module`: expected a loaded bundle, got {type(module).__name__}. {way_out}")


def _check_tensor(entry: StateTensor, tensor: torch.Tensor, module: BundleModule) -> None:
    reason = None
    if entry.subclass is not None:
        reason = module.form(entry.subclass).why_not(tensor)
    elif is_wrapper(tensor):
        reason = f"expected a plain tensor, got a `{type(tensor).__name__}`"
    if reason is not None:
        raise NotSupported(f"`{entry.name}`: {reason}. Save with what the programs were captured with, or export again")
    for record, part in zip(parts_of(entry), parts(tensor), strict=True):
        _check_part(entry.name, record, part)


def _check_part(name: str, entry: StateTensor | StoredPart, tensor: torch.Tensor) -> None:
    if dtypes.name_of(tensor.dtype) != entry.dtype or tuple(tensor.shape) != entry.shape:
        raise NotSupported(
            f"`{name}` is {dtypes.name_of(tensor.dtype)}{list(tensor.shape)}, and the programs were captured "
            f"with {entry.dtype}{list(entry.shape)}. Save with the original dtypes and shapes, or export again"
        )


def _write(module: BundleModule, tensors: dict[str, torch.Tensor], attributes: SavedAttributes, stage: Path) -> None:
    bundle = module.bundle
    current = module.state_tensors()
    stored = [
        (record, part)
        for entry in attributes.known
        for record, part in zip(parts_of(entry), parts(tensors[entry.name]), strict=True)
    ]
    rewritten = {record.file for record, _ in stored}
    rewritten |= {file for vector in bundle.manifest.testvectors for file in (vector.record, vector.tensors)}
    constants = {f"targets/onnx/{model.program}.safetensors" for model in bundle.manifest.onnx}
    # Files of tensors that only attributes held.
    left = {part.file for entry in bundle.manifest.state for part in parts_of(entry)} - rewritten
    remaining = [entry for entry in bundle.manifest.files if entry.path not in left]
    for entry in remaining:
        target = stage.joinpath(*entry.path.split("/"))
        target.parent.mkdir(parents=True, exist_ok=True)
        if entry.path in constants:
            # Readers of ONNX models refuse external data that are hard links.
            shutil.copyfile(bundle.file(entry.path), target)
        elif entry.path not in rewritten:
            _link(bundle.file(entry.path), target)
    for file in sorted({record.file for record, _ in stored}):
        in_file = [(record, part) for record, part in stored if record.file == file]
        _write_as_before(_stored(bundle, in_file), bundle.file(file), stage.joinpath(*file.split("/")))
    manifest = msgspec.structs.replace(
        bundle.manifest,
        training=module.training,
        state=(
            *(
                msgspec.structs.replace(entry, requires_grad=current[entry.name].requires_grad)
                for entry in attributes.known
            ),
            *attributes.found,
        ),
        attributes=attributes.attributes,
    )
    reloaded = module.over(manifest, {**tensors, **attributes.tensors}) if manifest.attributes else module
    for vector in bundle.manifest.testvectors:
        record, values = record_again(reloaded, vector)
        stage.joinpath(*vector.record.split("/")).write_bytes(schema.encode_record(record))
        save_file(values, stage.joinpath(*vector.tensors.split("/")))
    files = [_entry(e.path, stage) if e.path in rewritten else e for e in remaining]
    if attributes.stored:
        stage.joinpath(*FILE.split("/")).parent.mkdir(exist_ok=True)
        save_file(attributes.stored, stage.joinpath(*FILE.split("/")), metadata={"format": "pt"})
        files.append(_entry(FILE, stage))
    manifest = msgspec.structs.replace(manifest, files=tuple(sorted(files, key=lambda entry: entry.path)))
    (stage / MANIFEST_NAME).write_bytes(schema.encode_record(manifest))


def _stored(bundle: Bundle, in_file: list[tuple[StateTensor | StoredPart, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Return the current tensors of a safetensors file, by key."""
    stored: dict[str, torch.Tensor] = {}
    spans = [(record, tensor) for record, tensor in in_file if not record.whole]
    before = load_parts(bundle, [record for record, _ in spans], mapped=False)
    for (record, tensor), span in zip(spans, before, strict=True):
        span.copy_(tensor)
        stored[record.key] = torch.empty(0, dtype=span.dtype).set_(span.untyped_storage())
    for record, tensor in in_file:
        if record.whole:
            stored[record.key] = tensor.cpu().resolve_conj().resolve_neg().contiguous()
    return {
        key: (torch.view_as_real(tensor) if tensor.is_complex() else tensor).clone()
        for key, tensor in sorted(stored.items())
    }


def _write_as_before(tensors: dict[str, torch.Tensor], before: Path, path: Path) -> None:
    """Write a safetensors file with the header of `before`: ONNX models refer to the places of tensors in it."""
    with before.open("rb") as stream, path.open("wb") as target:
        start = stream.read(8)
        header = stream.read(struct.unpack("<Q", start)[0])
        target.write(start + header)
        begin, places = target.tell(), json.loads(header)
        target.truncate(before.stat().st_size)
        for key, tensor in tensors.items():
            target.seek(begin + places[key]["data_offsets"][0])
            target.write(tensor.reshape(-1).view(torch.uint8).numpy().data)


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


def _entry(path: str, stage: Path) -> FileEntry:
    full = stage.joinpath(*path.split("/"))
    with full.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    return FileEntry(path=path, nbytes=full.stat().st_size, sha256=digest)
