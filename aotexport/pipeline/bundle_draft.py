"""`BundleDraft`: the contents of a bundle, as far as the stages of an export have made them; and how it is written."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

import aotexport
from aotexport.encode.program import EncodedProgram
from aotexport.encode.submodules import settings_of
from aotexport.lower.build import CUDA, TargetFiles, write_targets
from aotexport.model.call import ExampleCall
from aotexport.model.programs import ProgramSpec
from aotexport.model.recipes import extensions_of, write_tokenizer
from aotexport.model.state import State
from aotexport.pipeline.options import ExportOptions
from aotexport.process.blocks import collected_rarely
from aotexport.process.clock import Clock
from aotexport.state.mode import in_mode
from aotexport.vectors.record import RecordedCall
from aotexport.verify.comparisons import Comparison
from aotexport.write import weights
from aotexport.write.files import write_manifest, write_programs, write_readme
from aotexport_runtime.schema.manifest import (
    IN_EVAL,
    OPTIMIZER,
    TRANSFORMERS,
    Ancestor,
    FileEntry,
    Manifest,
    ModuleAttribute,
    Producer,
    ProgramEntry,
    StateTensor,
    Submodule,
    VectorEntry,
)
from aotexport_runtime.schema.trees import Tree
from aotexport_runtime.schema.versions import CALLING_CONVENTION, FORMAT_VERSION, format_version


@dataclass(frozen=True, kw_only=True)
class BundleDraft:
    """The future contents of a bundle; every stage returns a new draft.

    Attributes:
        specs: the captured calls; never empty.
        programs: the encoded programs, one per call.
        state: the module's state, with the constants that traces found.
        attributes: values of the module's attributes that calls leave and read, by path.
        ancestors: loaded bundles that the module is or holds.
        weights: places of the tensors of `state` in files; empty: not yet written.
        entries: places of the recorded calls in files; empty: not yet written.
        digested: entries of files that no later stage changes.
        off_path: names of recorded calls that the checks of their program refused, by program.
        judged: a sentence per program whose verification allows for eager's own error.
    """

    options: ExportOptions
    specs: tuple[ProgramSpec, ...]
    programs: tuple[EncodedProgram, ...]
    state: State
    attributes: Mapping[str, Tree]
    modules: tuple[Submodule, ...]
    ancestors: tuple[Ancestor, ...] = ()
    weights: tuple[StateTensor, ...] = ()
    vectors: tuple[RecordedCall, ...] = ()
    entries: tuple[VectorEntry, ...] = ()
    digested: tuple[FileEntry, ...] = ()
    target_files: TargetFiles = field(default_factory=TargetFiles)
    off_path: Mapping[str, Collection[str]] = field(default_factory=dict)
    comparisons: tuple[Comparison, ...] = ()
    judged: Mapping[str, str] = field(default_factory=dict)

    @property
    def call(self) -> ExampleCall:
        """The example call of the first program."""
        return self.specs[0].call


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
    optimizer = next((each.optimizer for each in programs if each.optimizer is not None), None)
    in_eval = [] if module is None else [n for n, child in module.named_modules() if module.training > child.training]
    more = {OPTIMIZER: optimizer} | ({IN_EVAL: in_eval} if in_eval else {})
    with in_mode(module, "eval"):
        extensions = extensions_of(module, {program.record.method for program in programs}) | more
    extensions = {name: value for name, value in extensions.items() if value is not None}
    if TRANSFORMERS in extensions:
        write_tokenizer(module, directory)
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
        settings={name: value for name, value in settings_of(module, draft.state.asked).items() if name not in kept},
        testvectors=draft.entries,
        verification=draft.options.verification,
        ancestors=draft.ancestors,
        extensions=extensions,
        files=(),
    )
    return write_manifest(manifest, programs, directory, draft.digested)


def _entry(program: EncodedProgram) -> ProgramEntry:
    targets = ("portable", *sorted(program.compiled), *([] if program.lowered is None else [CUDA]))
    return ProgramEntry(name=program.record.name, targets=targets, variant_of=program.variant_of)


def _starts_in_training(draft: BundleDraft) -> bool:
    """Return whether a loaded module begins in train mode, like the model if the bundle has programs of both modes."""
    module, modes = draft.call.module, {program.record.mode for program in draft.programs}
    return module is not None and (module.training if {"train", "eval"} <= modes else "train" in modes)
