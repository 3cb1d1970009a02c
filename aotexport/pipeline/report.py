"""Tell the user the results of an export: what the model prints, the complete notes of programs, and the report."""

from __future__ import annotations

import builtins
import contextlib
import io
import logging
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from types import FrameType
from typing import Any

import msgspec

from aotexport.capture.trace.declared_sizes import range_of
from aotexport.encode.notes import OTHER_SIZES, Lines
from aotexport.encode.program import EncodedProgram
from aotexport.model.call import ExampleCall
from aotexport.model.programs import ProgramSpec, only_mode
from aotexport.model.source_lines import is_library_file, is_stdlib_file, is_user_frame, own_room, user_line
from aotexport.pipeline.bundle_draft import BundleDraft
from aotexport.process.patches import Patch, caller, patched
from aotexport.state.mode import mode_notes
from aotexport.torch_internals.calls import is_dimension
from aotexport.vectors.record import RecordedCall
from aotexport.verify.report import ExportReport
from aotexport_runtime.bundle.notes import BundleNote, listed
from aotexport_runtime.schema.manifest import Manifest
from aotexport_runtime.schema.program import Note, Program, SizeInput, StateInput
from aotexport_runtime.schema.sizes import Dimension
from aotexport_runtime.values.sizes import describe_range

_RAISES = "the backward pass of the model raises in every recorded call, in eager too: it cannot train"


def complete_notes(draft: BundleDraft, outputs: Iterable[str]) -> BundleDraft:
    """Return the draft with all notes of each program; `outputs`: a sentence per line that prints, logs or writes."""
    texts = tuple(outputs)
    raising = {recorded.record.program for recorded in draft.vectors if _backward_raises(recorded)}
    raising -= {recorded.record.program for recorded in draft.vectors if not _backward_raises(recorded)}
    lines = Lines(draft.options.source_root, draft.options.strip)

    def complete(spec: ProgramSpec, program: EncodedProgram) -> EncodedProgram:
        said = [*program.notes, *_of_modes(spec), *texts, *([_RAISES] if spec.name in raising else [])]
        judged = [draft.judged[spec.name]] if spec.name in draft.judged else []
        notes = [_seen(note) if draft.off_path.get(spec.name) else note for note in program.record.notes]
        notes += _of_ranges(program, spec.call)
        notes += [Note(kind="other", text=text, source=line) for text, line in map(lines.apart, [*said, *judged])]
        record = msgspec.structs.replace(program.record, notes=tuple(dict.fromkeys(notes)))
        return replace(program, notes=tuple(said), record=record)

    return replace(draft, programs=tuple(map(complete, draft.specs, draft.programs)))


def _backward_raises(recorded: RecordedCall) -> bool:
    facts = recorded.record.facts
    return any(name.endswith("backward") and fact.startswith("raises") for name, fact in facts.items())


def _of_modes(spec: ProgramSpec) -> list[str]:
    if (only := only_mode(spec.call.module)) is not None:
        return [f"`torch.export` made the model in {only} mode, its only one: the bundle refuses the other"]
    return [f"program {spec.name}: {note}" for note in mode_notes(spec.call.module, spec.mode)]


def report_of(draft: BundleDraft, manifest: Manifest, seconds: dict[str, float]) -> ExportReport:
    """Return the report of an export: `draft` as it was written, `seconds` of wall time per stage."""
    notes = listed(manifest, [program.record for program in draft.programs])
    notes += [BundleNote("other", (), text) for text in draft.target_files.notes]
    path = draft.options.output
    return ExportReport(path, manifest, list(draft.programs), list(draft.comparisons), seconds, notes)


def _seen(note: Note) -> Note:
    if note.kind not in ("branch", "number") or note.outside is None:
        return note
    refusal, _, rest = note.outside.partition(";")
    return msgspec.structs.replace(note, outside=f"{refusal}, as a call with other values did at the export;{rest}")


def _of_ranges(program: EncodedProgram, call: ExampleCall) -> list[Note]:
    """Return a note per dimension whose range is narrower than declared."""
    found: list[Note] = []
    for dimension in program.record.dimensions:
        declared = declared_range(program.record, dimension, call)
        if declared is None or not _is_narrower(dimension, declared):
            continue
        own, wide = describe_range(dimension.min, dimension.max), describe_range(*declared)
        fixed = f"`{dimension.name}` is in {own}"
        line = program.size_lines.get(dimension.symbol)
        unknown = (dimension.min or 0) <= 2 and dimension.max == declared[1] and line is None
        other = "elsewhere it was not verified" if unknown else "elsewhere the model goes another way, or fails"
        text = f"{fixed}, and {wide} was declared: {program.outside.get(dimension.symbol, other)}"
        found.append(Note(kind="size", text=text, fixed=fixed, outside=OTHER_SIZES, source=line))
    return found


def declared_range(program: Program, dimension: Dimension, call: ExampleCall) -> tuple[int | None, int | None] | None:
    """Return the range that the user declared for a dimension; None: it derives from another."""
    spec = program.inputs[dimension.input_index]
    if isinstance(spec, StateInput) or spec.path not in call.paths or (dimension.factor, dimension.offset) != (1, 0):
        return None
    declared: Any = (call.axes[call.paths.index(spec.path)] or {}).get(dimension.axis)
    if not is_dimension(declared):
        return None
    low, high = range_of(declared)
    return (low if isinstance(spec, SizeInput) else low or 0), high


def _is_narrower(dimension: Dimension, declared: tuple[int | None, int | None]) -> bool:
    low, high = declared
    higher = dimension.min is not None and (low is None or dimension.min > low)
    return higher or (dimension.max is not None and (high is None or dimension.max < high))


@contextlib.contextmanager
def output_noted() -> Iterator[Callable[[], list[str]]]:
    """Watch `print`, `open` and loggers in the block; yield a function that returns a sentence per line of the user's.

    A sentence says how often the line ran so far: an export calls the model several times.
    """
    seen = Counter[tuple[str, str]]()

    def watched(plain: Callable[..., Any], does: str, is_output: Callable[..., bool] = lambda *_, **__: True) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            if is_output(*args, **kwargs) and _is_models(caller()):
                seen[user_line(), does] += 1
            return plain(*args, **kwargs)

        return call

    opened = watched(open, "writes to a file", lambda file, mode="r", *_, **__: not set(str(mode)).isdisjoint("wax+"))
    # Libraries log many things once in a process.
    logged = watched(logging.Logger.handle, "logs", lambda _, record: not is_library_file(record.pathname))
    with patched(
        Patch(builtins, "print", watched(print, "prints"), "Note that the model prints"),
        Patch(builtins, "open", opened, "Note that the model writes to a file"),
        Patch(io, "open", opened, "Note that the model writes to a file"),
        Patch(logging.Logger, "handle", logged, "Note that the model logs"),
    ):
        yield lambda: [
            f"{line}the model {does}, and the bundle does not; this export ran the line {count} times"
            for (line, does), count in seen.items()
        ]


def _is_models(frame: FrameType | None) -> bool:
    """Return whether `frame` runs code of the model, or of Python for it, during a call of the model."""
    while frame is not None and is_stdlib_file(frame.f_code.co_filename):
        frame = frame.f_back
    if frame is None or not is_user_frame(frame):
        return False
    # These call it: in traces, and for real.
    callers = ("capture", "eager", "vectors")
    rooms = (room for frame, _ in traceback.walk_stack(frame) if (room := own_room(frame.f_code.co_filename)))
    return next((room in callers for room in rooms if room != "process"), False)
