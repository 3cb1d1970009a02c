"""Verify an ONNX model: compare ONNX Runtime with eager's results, and with the forward graph."""

from __future__ import annotations

import contextlib
import math
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from aotexport.errors import ExportFailed, VerificationFailed
from aotexport.lower.onnx.options import OnnxOptions
from aotexport.model.refusals import attempt
from aotexport.verify.comparison import Comparison
from aotexport.verify.comparison import comparisons as compared
from aotexport.verify.onnx.calls import random_calls
from aotexport.verify.onnx.widen import is_narrow, write_wide
from aotexport.write.files import list_again
from aotexport_runtime import OnnxRuntime
from aotexport_runtime.bundle.directory import BundleDirectory
from aotexport_runtime.bundle.read import Bundle
from aotexport_runtime.call.onnx.plan import OnnxPlan
from aotexport_runtime.commands.onnx_calls import Calls, observed, outputs_of, recorded
from aotexport_runtime.commands.self_test import rounding
from aotexport_runtime.errors import NotSupported, first_line
from aotexport_runtime.schema import encode_record
from aotexport_runtime.schema.manifest import Manifest, OnnxModel
from aotexport_runtime.schema.program import Program
from aotexport_runtime.schema.vectors import Vector
from aotexport_runtime.values.compare import compare
from aotexport_runtime.values.observe import NORM, NORMS

TARGET = "onnx"


def check_model(bundle: Bundle, program: Program, model: OnnxModel, options: OnnxOptions) -> list[Comparison]:
    """Compare an ONNX model with the recorded calls, and with the forward graph on random calls of other sizes.

    Args:
        bundle: with the model in it.
        program: its program.
        model: its entry in the manifest.
        options: the options that it was made with.

    Returns:
        Every compared output.

    Raises:
        VerificationFailed: it disagrees, or ONNX Runtime does not run it; names the first value that differs.
    """
    with tempfile.TemporaryDirectory() as directory:
        subject = _opened(bundle, program, model, Path(directory))
        return _check(bundle, program, model, options, subject)


@dataclass(frozen=True)
class _Subject:
    """An opened model, and the state that its calls change."""

    plan: OnnxPlan
    state: dict[str, Any]

    def run(self, *args: Any, **kwargs: Any) -> Any:
        return self.plan(args, kwargs)


def _opened(bundle: Bundle, program: Program, model: OnnxModel, directory: Path) -> _Subject:
    """Open a model; if ONNX Runtime lacks kernels of bfloat16, open one of float32 instead."""
    state: dict[str, Any] = {}
    try:
        return _Subject(OnnxPlan(bundle, program, model, OnnxRuntime(), state), state)
    except NotSupported as error:
        if is_narrow(bundle.file(model.file)):
            with contextlib.suppress(NotSupported):
                wide = write_wide(bundle.file(model.file), directory)
                replaced = _Replaced(bundle.directory, bundle.manifest, model.file, wide)
                return _Subject(OnnxPlan(replaced, program, model, OnnxRuntime(), state), state)
        from aotexport.verify.onnx.locate import origin

        found = origin(bundle.file(model.file), str(error))
        where = f". {found}" if found else ""
        raise VerificationFailed(
            f"program `{program.name}`: {error}{where}. `--no-verify` writes the model as it is", [str(error)]
        ) from None


class _Replaced(Bundle):
    """A bundle with one of its files replaced by another."""

    def __init__(self, directory: BundleDirectory, manifest: Manifest, file: str, other: Path) -> None:
        super().__init__(directory, manifest)
        self._file, self._other = file, other

    def intact_file(self, path: str) -> Path:
        return self._other if path == self._file else super().intact_file(path)


def _check(
    bundle: Bundle, program: Program, model: OnnxModel, options: OnnxOptions, subject: _Subject
) -> list[Comparison]:
    found: list[Comparison] = []
    for calls in [*recorded(bundle, program, model), *random_calls(bundle, program, model)]:
        comparisons = _compare(bundle, program, model, subject, calls)
        if any(not each.agrees and math.isfinite(each.error) for each in comparisons):
            from aotexport.verify.onnx.own_errors import own_errors

            errors = calls.eager_errors | own_errors(bundle, program, model, calls)
            comparisons = _compare(bundle, program, model, subject, replace(calls, eager_errors=errors))
            if errors != calls.eager_errors and all(comparison.agrees for comparison in comparisons):
                _record(bundle, program, calls.name, errors)
        if not all(comparison.agrees for comparison in comparisons):
            from aotexport.verify.onnx.locate import first_difference, origin

            lines = [_line(comparison) for comparison in comparisons if not comparison.agrees]
            raised = origin(bundle.file(model.file), lines[0])
            where = f"  {raised}" if raised else first_difference(bundle, program, model, options, calls.values)
            raise VerificationFailed(
                "ONNX Runtime disagrees with eager execution; nothing was written:\n" + "\n".join([*lines, where]),
                lines,
            )
        found += comparisons
    return found


def _record(bundle: Bundle, program: Program, call: str, errors: dict[str, float]) -> None:
    """Write the errors of float32 to a recorded call, if it is one."""
    for entry in bundle.manifest.testvectors:
        if (entry.program, entry.name) == (program.name, call):
            record = msgspec.structs.replace(bundle.record(entry.record, Vector), eager_errors=errors)
            # A new file, not new content: the old one may be a hard link to another bundle's.
            (bundle.root / entry.record).unlink()
            (bundle.root / entry.record).write_bytes(encode_record(record))
            list_again(bundle.root, bundle.manifest)


def _line(comparison: Comparison) -> str:
    detail = comparison.detail or (
        f"largest absolute difference {comparison.absolute:.2e}, relative to the largest value {comparison.error:.2e}"
    )
    return f"  {comparison.program}/{comparison.vector} (onnx): {comparison.name}: {detail}"


def _compare(bundle: Bundle, program: Program, model: OnnxModel, subject: _Subject, calls: Calls) -> list[Comparison]:
    """Compare ONNX Runtime's results of consecutive calls with the expected ones."""
    base: dict[str, Any] = {"program": program.name, "vector": calls.name, "target": TARGET}
    if calls.refused:
        name = f"not compared at {calls.name}: {calls.refused}"
        return [Comparison(**base, name=name, error=0.0, absolute=0.0, agrees=True, detail=calls.refused)]
    try:
        with attempt("calls of ONNX Runtime"):
            got = observed(program, model, calls, subject.run, subject.state)
    except ExportFailed as refusal:
        return compared({**base, "error": f"raises {first_line(refusal.error)}"})
    least = rounding(bundle, program.name)
    differences = compare(calls.expected, got, least=least, eager_errors=calls.eager_errors)
    found = compared({**base, "error": "", "differences": [asdict(difference) for difference in differences]})
    if model.updates or all(comparison.agrees for comparison in found):
        return found
    outputs = outputs_of(program, subject.run, calls.values, {})
    return [_tie(bundle, program, calls, outputs, one) for one in found]


def _tie(
    bundle: Bundle, program: Program, calls: Calls, outputs: Mapping[str, Any], comparison: Comparison
) -> Comparison:
    """Return the comparison; it agrees if only indices of equal values differ."""
    path = comparison.name.partition(": ")[2].removesuffix(NORM).removesuffix(NORMS)
    if comparison.agrees or comparison.detail or path not in outputs:
        return comparison
    from aotexport.verify.onnx.ties import is_tie

    if not is_tie(bundle, program, calls.values, path, outputs[path]):
        return comparison
    same = {"error": 0.0, "absolute": 0.0, "agrees": True, "detail": "other indices, of equal values"}
    return replace(comparison, name=f"{comparison.name} (of equal values)", **same)
