"""Find where an ONNX model first differs from torch, by running the same call value by value."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import onnx
import onnxruntime
import torch

from aotexport.errors import ExportFailed
from aotexport.lower.onnx.options import OnnxOptions
from aotexport.lower.onnx.provenance import provenance
from aotexport.lower.onnx.trace import traced
from aotexport.lower.onnx.translate import to_onnx
from aotexport.model.refusals import attempt
from aotexport_runtime.bundle.read import Bundle
from aotexport_runtime.engines.onnx.session import run_session
from aotexport_runtime.schema.manifest import OnnxModel
from aotexport_runtime.schema.program import Program
from aotexport_runtime.values.compare import TOLERANCES

_FOLDER = "session.model_external_initializers_file_folder_path"


def first_difference(
    bundle: Bundle, program: Program, model: OnnxModel, options: OnnxOptions, values: Sequence[Any]
) -> str:
    """Return a sentence on the first value that differs, by its nodes in torch and ONNX and the user's line.

    Args:
        bundle: with the model in it.
        program: its program.
        model: its entry in the manifest.
        options: the options that it was made with.
        values: arguments of a call whose outputs differ.
    """
    try:
        with attempt("search of the first value that differs"):
            expected = _torch_values(bundle, program, options, values)
            proto = onnx.load(bundle.file(model.file), load_external_data=False)
            known = [name for node in proto.graph.node for name in node.output if name in expected]
            got = _onnx_values(bundle, model, proto, known, values)
    except ExportFailed as refusal:
        return f"  (the first value that differs could not be found: {type(refusal.error).__name__}: {refusal.error})"[
            :500
        ]
    producers = {name: node for node in proto.graph.node for name in node.output}
    for name, (value, node) in expected.items():
        if name in got and (wrong := _wrong(value, got[name])):
            source = provenance(node.meta.get("stack_trace"))
            where = f", {source['source']}" if "source" in source else ""
            module = f", in `{source['module']}`" if "module" in source else ""
            return (
                f"  the first value that differs is `{name}`: torch's {node.target}, ONNX's "
                f"{producers[name].op_type} `{producers[name].name}`{where}{module}: {wrong}"
            )
    return "  every intermediate value that both have agrees; the difference arises after the last of them"


def origin(path: Path, reason: str) -> str:
    """Return the origin of a node that ONNX Runtime names: operator and the user's line; empty: unknown.

    Args:
        path: of the model.
        reason: the message of ONNX Runtime.
    """
    proto = onnx.load(path, load_external_data=False)
    for node in proto.graph.node:
        if f"({node.name})" in reason or f"'{node.name}'" in reason:
            found = {prop.key: prop.value for prop in node.metadata_props}
            where = f" ({found['aotexport.source']})" if "aotexport.source" in found else ""
            return f"`{node.name}` is torch's `{found.get('aotexport.operator', '')}`{where}"
    return ""


def _torch_values(
    bundle: Bundle, program: Program, options: OnnxOptions, values: Sequence[Any]
) -> dict[str, tuple[torch.Tensor, Any]]:
    program, _, exported = traced(bundle, program, options)
    converted = to_onnx(program, exported, opset=options.opset, translations=options.translations)
    recorder = _Recorder(converted.exported_program.module(check_guards=False))
    with torch.no_grad():
        recorder.run(*values)
    return recorder.seen


class _Recorder(torch.fx.Interpreter):
    """Runs a graph and records every tensor."""

    def __init__(self, module: Any) -> None:
        super().__init__(module)
        self.seen: dict[str, tuple[torch.Tensor, Any]] = {}

    def run_node(self, n: torch.fx.Node) -> Any:
        result = super().run_node(n)
        if n.op == "call_function" and isinstance(result, torch.Tensor):
            self.seen[n.name] = (result.detach().clone(), n)
        return result


def _onnx_values(
    bundle: Bundle, model: OnnxModel, proto: Any, names: Sequence[str], values: Sequence[Any]
) -> dict[str, torch.Tensor]:
    have = {output.name for output in proto.graph.output}
    proto.graph.output.extend(onnx.ValueInfoProto(name=name) for name in names if name not in have)
    options = onnxruntime.SessionOptions()
    options.add_session_config_entry(_FOLDER, str(bundle.root))
    session = onnxruntime.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])
    if not names:
        return {}
    return dict(zip(names, run_session(session, model.inputs, values, names, with_torch=True), strict=True))


def _wrong(expected: torch.Tensor, got: Any) -> str:
    """Return the difference of two values in words; empty: there is none."""
    if not isinstance(got, torch.Tensor) or got.shape != expected.shape:
        return f"shape {list(expected.shape)} in torch, {list(getattr(got, 'shape', ()))} in ONNX"
    a, b = expected.to(torch.float64), got.to(torch.float64)
    same = (a == b) | (a.isnan() & b.isnan())
    gap = float(torch.where(same, 0.0, (a - b).abs()).max()) if a.numel() else 0.0
    scale = max(float(a[a.isfinite()].abs().max()) if bool(a.isfinite().any()) else 0.0, 1e-3)
    if gap / scale <= TOLERANCES.get(expected.dtype, 0.0):
        return ""
    return f"largest absolute difference {gap:.2e}"
