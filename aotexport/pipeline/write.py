"""Write a draft below the directory of its bundle."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

import aotexport
from aotexport.encode.program import EncodedProgram
from aotexport.encode.submodules import settings_of
from aotexport.lower.build import write_targets
from aotexport.pipeline.bundle_draft import BundleDraft
from aotexport.process.blocks import collected_rarely
from aotexport.process.clock import Clock
from aotexport.write import weights
from aotexport.write.files import write_manifest, write_programs, write_readme
from aotexport_runtime.schema import CALLING_CONVENTION, FORMAT_VERSION
from aotexport_runtime.schema.manifest import Manifest, ModuleAttribute, Producer, ProgramEntry
from aotexport_runtime.schema.versions import format_version


def write_weights(draft: BundleDraft, directory: Path, clock: Clock) -> BundleDraft:
    """Write the state of the module; return the draft with the place of each tensor."""
    clock.stage("write weights")
    places = weights.write_weights(draft.state, directory, shard_nbytes=draft.options.shard_nbytes)
    return replace(draft, weights=places)


@collected_rarely()
def write_bundle(draft: BundleDraft, directory: Path) -> Manifest:
    """Write everything but weights, recorded calls and libraries, replacing earlier files; return the manifest."""
    programs, module = draft.programs, draft.call.module
    name = draft.call.name if module is None else type(module).__name__
    write_programs(programs, directory)
    write_targets(programs, draft.target_files, directory)
    write_readme(directory, name, programs)
    version = format_version(FORMAT_VERSION)
    kept = {*draft.attributes}.union(*((entry.name, *entry.tied) for entry in draft.weights))
    manifest = Manifest(
        format=version,
        min_reader=version,
        calling_convention=CALLING_CONVENTION,
        producer=Producer(aotexport=aotexport.__version__, torch=str(torch.__version__)),
        name=name,
        kind="module" if module is not None else "function",
        training=_starts_in_training(draft),
        programs=tuple(map(_entry, programs)),
        state=draft.weights,
        attributes=tuple(ModuleAttribute(name=name, value=value) for name, value in draft.attributes.items()),
        modules=draft.modules,
        settings={name: value for name, value in settings_of(module).items() if name not in kept},
        testvectors=draft.entries,
        verification=draft.options.verification,
        ancestors=draft.ancestors,
        files=(),
    )
    return write_manifest(manifest, programs, directory, draft.digested)


def _entry(program: EncodedProgram) -> ProgramEntry:
    targets = ("portable", *sorted((*program.lowered, *program.compiled)))
    return ProgramEntry(name=program.record.name, targets=targets, variant_of=program.variant_of)


def _starts_in_training(draft: BundleDraft) -> bool:
    """Return whether a loaded module begins in train mode, like the model if the bundle has programs of both modes."""
    module, modes = draft.call.module, {program.record.mode for program in draft.programs}
    if module is None:
        return False
    return module.training if {"train", "eval"} <= modes else "train" in modes
