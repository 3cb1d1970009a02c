"""Rules of an ONNX model: it takes and returns what its program does."""

from __future__ import annotations

from aotexport_runtime.errors import Place
from aotexport_runtime.schema.manifest import OnnxModel
from aotexport_runtime.schema.program import Program, StateInput


def check_onnx(model: OnnxModel, program: Program, *, where: Place) -> None:
    """Refuse the record of an ONNX model that does not fit its program.

    Raises:
        BundleInvalid: names the fault.
    """
    paths = [spec.path for spec in program.inputs if not isinstance(spec, StateInput)]
    names = {spec.name for spec in program.inputs if isinstance(spec, StateInput)}
    counts = len(paths), len(program.outputs) + len(model.updates) + len(model.checks)
    if (len(model.inputs), len(model.outputs)) != counts:
        raise where.invalid(
            f"{len(model.inputs)} inputs and {len(model.outputs)} outputs, and program `{program.name}` has "
            f"{counts[0]} and {counts[1]}",
            "onnx-malformed/counts",
        )
    for name in model.updates:
        if (name in paths) == (name in names):
            raise where.invalid(f"the model changes {name[:80]!r}, which is no one input", "onnx-malformed/updates")
