"""`BundleDraft`: the contents of a bundle, as far as the stages of an export have made them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from aotexport.encode.program import EncodedProgram
from aotexport.lower.build import TargetFiles
from aotexport.model.call import ExampleCall
from aotexport.model.programs import ProgramSpec
from aotexport.model.state import State
from aotexport.pipeline.options import ExportOptions
from aotexport.vectors.record import RecordedCall
from aotexport.verify.comparison import Comparison
from aotexport_runtime.schema.manifest import Ancestor, FileEntry, StateTensor, Submodule, VectorEntry
from aotexport_runtime.schema.trees import Tree


@dataclass(frozen=True, kw_only=True)
class BundleDraft:
    """The future contents of a bundle; every stage returns a new draft.

    Attributes:
        options: of the export.
        specs: the captured calls; never empty.
        programs: the encoded programs, one per call.
        state: the module's state, with the constants that traces found.
        attributes: values of the module's attributes that calls leave and read, by path.
        modules: records of the module and its submodules.
        ancestors: loaded bundles that the module is or holds.
        weights: places of the tensors of `state` in files; empty: not yet written.
        vectors: the recorded calls.
        entries: places of the recorded calls in files; empty: not yet written.
        digested: entries of files that no later stage changes.
        target_files: files shared by the programs of a target.
        off_path: names of recorded calls that the checks of their program refused, by program.
        comparisons: comparisons with eager execution.
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
