"""Tell the user the results of an export: the complete notes of programs, and the report."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from aotexport.encode.notes import Lines
from aotexport.encode.program import EncodedProgram
from aotexport.encode.program_notes import with_notes
from aotexport.model.mode import eval_mode_note, only_mode
from aotexport.model.programs import ProgramSpec
from aotexport.pipeline.bundle_draft import BundleDraft
from aotexport.vectors.record import RecordedCall
from aotexport.verify.report import ExportReport
from aotexport_runtime.bundle.notes import BundleNote, listed
from aotexport_runtime.schema.manifest import Manifest

_RAISES = "the backward pass of the model raises in every recorded call, in eager too: it cannot train"


def complete_notes(draft: BundleDraft, outputs: Iterable[str]) -> BundleDraft:
    """Return the draft with all notes of each program in its record.

    Args:
        draft: as it was verified.
        outputs: a sentence per line that prints, logs or writes to a file.
    """
    texts = tuple(outputs)
    raising = {recorded.record.program for recorded in draft.vectors if _backward_raises(recorded)}
    raising -= {recorded.record.program for recorded in draft.vectors if not _backward_raises(recorded)}
    lines = Lines(draft.options.source_root, draft.options.strip)
    programs = tuple(
        with_notes(
            _with_texts(spec, program, (*texts, *([_RAISES] if spec.name in raising else []))),
            spec.call,
            draft.off_path.get(spec.name, ()),
            draft.judged.get(spec.name),
            lines,
        )
        for spec, program in zip(draft.specs, draft.programs, strict=True)
    )
    return replace(draft, programs=programs)


def _backward_raises(recorded: RecordedCall) -> bool:
    facts = recorded.record.facts
    return any(name.endswith("backward") and fact.startswith("raises") for name, fact in facts.items())


def _with_texts(spec: ProgramSpec, program: EncodedProgram, texts: Iterable[str]) -> EncodedProgram:
    in_eval = [f"program {spec.name}: {note}" for note in eval_mode_note(spec.call.module, spec.mode)]
    only = only_mode(spec.call.module)
    if only is not None:
        in_eval = [f"`torch.export` made the model in {only} mode, its only one: the bundle refuses the other"]
    return replace(program, notes=(*program.notes, *in_eval, *texts))


def report_of(draft: BundleDraft, manifest: Manifest, seconds: dict[str, float]) -> ExportReport:
    """Return the report of an export.

    Args:
        draft: as it was written.
        manifest: of the bundle.
        seconds: wall time per stage.
    """
    notes = listed(manifest, [program.record for program in draft.programs])
    notes += [BundleNote("other", (), text) for text in draft.target_files.notes]
    path = draft.options.output
    return ExportReport(path, manifest, list(draft.programs), list(draft.comparisons), seconds, notes)
