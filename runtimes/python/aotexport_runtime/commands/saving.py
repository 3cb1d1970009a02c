"""`save`: tuned weights as a new bundle that shares everything else with the loaded one."""

from __future__ import annotations

import gc
import hashlib
import json
import os
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors.torch import save_file

from aotexport_runtime.bundle.cast_programs import CastPrograms, cast_dtypes
from aotexport_runtime.bundle.directory import MANIFEST_NAME, BundleDirectory
from aotexport_runtime.bundle.read import Bundle
from aotexport_runtime.bundle.staging import link, staged
from aotexport_runtime.bundle.weights import load_parts, load_tensors, parts_of
from aotexport_runtime.commands.saved_attributes import FILE, SavedAttributes, saved_attributes
from aotexport_runtime.commands.self_test import record_again
from aotexport_runtime.errors import ArgumentInvalid, NotSupported, listed
from aotexport_runtime.module.bundle_module import BundleModule
from aotexport_runtime.module.cast import CastBundle, in_dtype
from aotexport_runtime.schema.codec import encode_record
from aotexport_runtime.schema.manifest import FileEntry, StateTensor, StoredPart
from aotexport_runtime.submodules.adapter import adapters_below
from aotexport_runtime.submodules.tables import is_sharded, named, slot_of
from aotexport_runtime.values import dtypes
from aotexport_runtime.values.arguments import path_of
from aotexport_runtime.values.meshes import Gathering
from aotexport_runtime.values.subclasses import is_wrapper, parts


def save(module: BundleModule, path: str | os.PathLike[str], *, force: bool = False) -> Path:
    """Write the current weights and attributes of `module` as a new bundle at `path`.

    Graphs and programs are hard links to the files of the loaded bundle where the file system allows, else copies.
    The recorded calls are recorded anew, from the forward graphs with the new weights.

    Of a module that `fully_shard` has parted, every rank calls this; rank 0 writes, one gathered tensor at a time.

    Args:
        module: a loaded bundle.
        path: directory to write, in one step: a crash leaves the old bundle or the new one.
        force: replace a bundle at `path`.

    Returns:
        The directory.

    Raises:
        ArgumentInvalid: `module` is no loaded bundle, or `path` no path.
        NotSupported: `module` was loaded in another dtype, submodules of it were changed, tensors that are tied in
            the programs no longer are, a tensor no longer has the dtype or shape that the programs were captured with,
            or an attribute holds a value that a bundle cannot hold.
        OutputExists: something is at `path`, or nothing can be made there.
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
    in_parts = any(is_sharded(part._parameters) for part in module.modules())

    def write() -> None:
        with staged(output, force=force) as stage:
            _check_ties(module)
            attributes = saved_attributes(module)
            for entry in attributes.known:
                _check_tensor(entry, tensors[entry.name], module, in_parts=in_parts)
            _write(module, tensors, attributes, stage, gathering)

    with torch.no_grad():
        tensors = {name: tensor.detach() for name, tensor in module.state_tensors().items()}
        # File by file, as they are written.
        plain = sorted((e for e in module.bundle.manifest.state if e.subclass is None), key=lambda entry: entry.file)
        gathering = Gathering([tensors[entry.name] for entry in plain], in_parts=in_parts)
    gathering.written_by_first_rank(write)
    return output.absolute()


def _check_unchanged(module: BundleModule) -> None:
    """Refuse a module with changed submodules, whose code a bundle cannot hold, and one with adapters."""
    needed = (named(path, each.tensor) for path, each in adapters_below(module) if each.is_needed())
    adapted = next(needed, None)
    if adapted is not None:
        raise NotSupported(
            f"`{adapted}` has an adapter, and `save` writes the programs that were exported, with other weights. Merge "
            "the adapter into the weights first (`aotexport_runtime.adapters.merge_adapter`), or write it alone "
            "(`save_adapter`)"
        )
    changed = [change for change in module.changes() if not change.keeps_state]
    if changed:
        found = listed([f"`{change.path}` {change.how}" for change in changed])
        raise NotSupported(
            f"{found}, and `save` writes the programs that were exported, with other weights. Export the loaded "
            "module as it is now (`aotexport.export(module, ...)`), which captures it whole"
        )


def _check_ties(module: BundleModule) -> None:
    """Refuse a module whose tied tensors are tied no longer."""
    for entry in (entry for entry in module.bundle.manifest.state if entry.tied and entry.role != "constant"):
        names = (entry.name, *entry.tied)
        slots = [slot_of(module, name) for name in names]
        first, *others = [None if slot is None else slot[0].get(slot[1]) for slot in slots]
        if any(other is not first for other in others):
            found = ", ".join(f"`{name}`" for name in names)
            raise NotSupported(f"{found} are one tensor in the programs, and no longer are in the module")


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


def _check_tensor(entry: StateTensor, tensor: torch.Tensor, module: BundleModule, *, in_parts: bool) -> None:
    reason = None
    if entry.subclass is not None:
        reason = module.form(entry.subclass).why_not(tensor)
    elif is_wrapper(tensor) and not in_parts:
        reason = f"expected a plain tensor, got a `{type(tensor).__name__}`"
    if reason is not None:
        raise NotSupported(f"`{entry.name}`: {reason}. Save with what the programs were captured with, or export again")
    for record, part in _parts(entry, tensor):
        dtype, shape = dtypes.name_of(part.dtype), tuple(part.shape)
        if (dtype, shape) != (record.dtype, record.shape):
            raise NotSupported(
                f"`{entry.name}` is {dtype}{list(shape)}, and the programs were captured with "
                f"{record.dtype}{list(record.shape)}. Save with the original dtypes and shapes, or export again"
            )


def _write(
    module: BundleModule,
    tensors: dict[str, torch.Tensor],
    attributes: SavedAttributes,
    stage: Path,
    gathering: Gathering,
) -> None:
    bundle = module.bundle
    current = module.state_tensors()
    stored = [pair for entry in attributes.known for pair in _parts(entry, tensors[entry.name])]
    rewritten = {record.file for record, _ in stored}
    whole = not gathering.in_parts
    casts = {dtype: CastPrograms(bundle, dtype).manifest.testvectors for dtype in cast_dtypes(bundle.manifest)}
    of_casts = {file for calls in casts.values() for call in calls for file in (call.record, call.tensors)}
    rewritten |= {file for call in bundle.manifest.testvectors for file in (call.record, call.tensors)}
    rewritten |= of_casts if whole else set()
    # Files of tensors that only attributes held, and calls of the cast model, which is not made in parts.
    left = {part.file for entry in bundle.manifest.state for part in parts_of(entry)} | of_casts
    left -= rewritten
    remaining = [entry for entry in bundle.manifest.files if entry.path not in left]
    copy_files(bundle, remaining, rewritten, stage)
    for file in sorted({record.file for record, _ in stored}):
        in_file = [(record, part) for record, part in stored if record.file == file]
        rewriting = _rewritten(bundle, in_file, gathering)
        _write_as_before(rewriting, bundle.file(file), stage.joinpath(*file.split("/")))
    replaced = msgspec.structs.replace
    known = (replaced(e, requires_grad=current[e.name].requires_grad) for e in attributes.known)
    manifest = replaced(
        bundle.manifest, training=module.training, state=(*known, *attributes.found), attributes=attributes.attributes
    )
    written = replaced(manifest, files=tuple(remaining))
    mapped = Bundle(BundleDirectory(stage), written, bundle.limits)

    def over(target: str) -> BundleModule:
        gc.collect()  # The module before refers to itself, and has the files mapped.
        tensors = load_tensors(mapped, attributes.known, module.form, mapped=True)
        own = {name: tensor.clone() for name, tensor in attributes.tensors.items()}
        return module.over(manifest, {**tensors, **own}, target=target)

    reloaded = module.over(manifest, {**tensors, **attributes.tensors}) if whole and manifest.attributes else module
    again = [(reloaded, vector) for vector in bundle.manifest.testvectors]
    for dtype, vectors in casts.items() if whole else ():
        cast = in_dtype(module, dtypes.dtype(dtype))
        again += [(cast, vector) for vector in vectors]
    for called, vector in again:
        record, values = record_again(called, vector, None if whole or called is not reloaded else over)
        stage.joinpath(*vector.record.split("/")).write_bytes(encode_record(record))
        save_file(values, stage.joinpath(*vector.tensors.split("/")))
    files = [entry_of(e.path, stage) if e.path in rewritten else e for e in remaining]
    if attributes.stored:
        stage.joinpath(*FILE.split("/")).parent.mkdir(exist_ok=True)
        save_file(attributes.stored, stage.joinpath(*FILE.split("/")), metadata={"format": "pt"})
        files.append(entry_of(FILE, stage))
    manifest = replaced(manifest, files=tuple(sorted(files, key=lambda entry: entry.path)))
    (stage / MANIFEST_NAME).write_bytes(encode_record(manifest))


def copy_files(bundle: Bundle, entries: Iterable[FileEntry], rewritten: set[str], stage: Path) -> None:
    """Link or copy the files of a bundle that are not `rewritten` to a directory; make the directories of all."""
    for entry in entries:
        target = stage.joinpath(*entry.path.split("/"))
        target.parent.mkdir(parents=True, exist_ok=True)
        if entry.path not in rewritten:
            link(bundle.file(entry.path), target)


def _parts(entry: StateTensor, tensor: torch.Tensor) -> Iterator[tuple[StateTensor | StoredPart, torch.Tensor]]:
    """Return the stored parts of an entry with their tensors; one of its own, unless it is of a tensor subclass."""
    return zip(parts_of(entry), (tensor,) if entry.subclass is None else parts(tensor), strict=True)


def _rewritten(
    bundle: Bundle, in_file: list[tuple[StateTensor | StoredPart, torch.Tensor]], gathering: Gathering
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the current tensors of a safetensors file, by key, each when it is asked for."""
    before = iter(load_parts(bundle, [record for record, _ in in_file if not record.whole], mapped=False))
    spans: dict[str, torch.Tensor] = {}
    for record, tensor in in_file:
        tensor = gathering.whole(tensor)
        if record.whole:
            yield record.key, tensor.cpu().resolve_conj().resolve_neg().contiguous()
        else:
            span = next(before)
            span.copy_(tensor)
            spans[record.key] = torch.empty(0, dtype=span.dtype).set_(span.untyped_storage())
    yield from spans.items()


def _write_as_before(tensors: Iterable[tuple[str, torch.Tensor]], before: Path, path: Path) -> None:
    """Write a safetensors file with the header of `before`: ONNX models refer to the places of tensors in it."""
    with before.open("rb") as stream, path.open("wb") as target:
        start = stream.read(8)
        header = stream.read(struct.unpack("<Q", start)[0])
        target.write(start + header)
        begin, places = target.tell(), json.loads(header)
        target.truncate(before.stat().st_size)
        for key, tensor in tensors:
            stored = torch.view_as_real(tensor) if tensor.is_complex() else tensor
            target.seek(begin + places[key]["data_offsets"][0])
            target.write(stored.reshape(-1).view(torch.uint8).numpy().data)


def entry_of(path: str, stage: Path) -> FileEntry:
    """Return the entry of a file below a directory."""
    full = stage.joinpath(*path.split("/"))
    with full.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    return FileEntry(path=path, nbytes=full.stat().st_size, sha256=digest)
