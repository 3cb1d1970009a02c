"""Verify an ONNX model: compare ONNX Runtime with eager's results."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import onnx
import onnx_ir as ir
import torch

from aotexport.errors import ExportFailed, VerificationFailed
from aotexport.lower.onnx.plain import plain
from aotexport.lower.onnx.rebuild import Rebuilt
from aotexport.model.refusals import attempt
from aotexport.verify.comparisons import Comparison
from aotexport.verify.comparisons import comparisons as compared
from aotexport.verify.onnx.errors import own_errors, seen
from aotexport.write.files import list_again
from aotexport_runtime import OnnxRuntime, load
from aotexport_runtime.bundle.read import Bundle, open_bundle
from aotexport_runtime.call.plan import Plan
from aotexport_runtime.commands.onnx_calls import ORDERS, Calls, calling, observed, order_of, recorded
from aotexport_runtime.commands.results import VectorResult, rounding
from aotexport_runtime.errors import NotSupported, first_line
from aotexport_runtime.module.onnx_module import compose_onnx
from aotexport_runtime.module.optimizer import SEED
from aotexport_runtime.schema.codec import encode_record
from aotexport_runtime.schema.graph import Graph
from aotexport_runtime.schema.manifest import OnnxModel
from aotexport_runtime.schema.program import ArgumentInput, Program
from aotexport_runtime.schema.trees import Leaf
from aotexport_runtime.schema.values import TensorMeta
from aotexport_runtime.validate.arguments import metas_of
from aotexport_runtime.values.compare import NORM, NORMS, compare
from aotexport_runtime.values.trees import leaves

TARGET = "onnx"


def check_model(bundle: Bundle, program: Program, model: OnnxModel) -> list[Comparison]:
    """Compare an ONNX model, which `bundle` has in it, with recorded calls, some of which have other sizes.

    Returns every compared output. `VerificationFailed`: it disagrees, or ONNX Runtime does not run it.
    """
    with tempfile.TemporaryDirectory() as directory:
        subject = _opened(bundle, program, model, Path(directory))
        calls = recorded(bundle, program, model)
        if any(isinstance(spec, ArgumentInput) and spec.path == SEED for spec in program.inputs):
            # Eager drew otherwise.
            namespaces = bundle.manifest.requirements.operator_namespaces
            module = load(bundle.root, target="autograd", check_digests=False, operator_namespaces=namespaces)
            calls = [replace(each, expected=seen(module.twin(), program, model, each)) for each in calls]
        return [found for each in calls for found in _checked(bundle, program, model, subject, each)]


_Subject = tuple[Plan, dict[str, Any]]
"""An opened model, and the state that its calls change."""


def _opened(bundle: Bundle, program: Program, model: OnnxModel, directory: Path) -> _Subject:
    """Open a model; if ONNX Runtime lacks kernels of bfloat16, open one of float32 instead."""
    state: dict[str, Any] = {}
    try:
        return compose_onnx(bundle, program, model, OnnxRuntime(), state), state
    except NotSupported as error:
        if _is_narrow(bundle.file(model.file)):
            with contextlib.suppress(NotSupported):
                return compose_onnx(_widened(bundle, model, directory), program, model, OnnxRuntime(), state), state
        found = _origin(bundle.file(model.file), str(error))
        where = f". {found}" if found else ""
        raise VerificationFailed(
            f"program `{program.name}`: {error}{where}. `--no-verify` writes the model as it is", [str(error)]
        ) from None


def _checked(bundle: Bundle, program: Program, model: OnnxModel, subject: _Subject, calls: Calls) -> list[Comparison]:
    comparisons = _compare(bundle, program, model, subject, calls)
    if not all(each.agrees for each in comparisons):
        errors = calls.eager_errors | own_errors(bundle, program, model, calls)
        comparisons = _compare(bundle, program, model, subject, replace(calls, eager_errors=errors))
        if errors != calls.eager_errors and all(comparison.agrees for comparison in comparisons):
            _record(bundle, program, calls.name, errors)
    if lines := [_line(comparison) for comparison in comparisons if not comparison.agrees]:
        told = ["ONNX Runtime disagrees with eager execution; nothing was written:", *lines]
        if found := _origin(bundle.file(model.file), lines[0]):
            told.append(f"  {found}")
        raise VerificationFailed("\n".join(told), lines)
    return comparisons


def _origin(path: Path, reason: str) -> str:
    """Return operator and line of the user behind a node that ONNX Runtime names in `reason`; empty: unknown."""
    for node in onnx.load(path, load_external_data=False).graph.node:
        if f"({node.name})" in reason or f"'{node.name}'" in reason:
            found = {prop.key: prop.value for prop in node.metadata_props}
            where = f" ({found['aotexport.source']})" if "aotexport.source" in found else ""
            return f"`{node.name}` is torch's `{found.get('aotexport.operator', '')}`{where}"
    return ""


def _record(bundle: Bundle, program: Program, call: str, errors: dict[str, float]) -> None:
    for entry in bundle.manifest.testvectors:
        if (entry.program, entry.name) == (program.name, call):
            record = msgspec.structs.replace(bundle.vector(entry), eager_errors=errors)
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
    result = VectorResult(program.name, calls.name, TARGET, [])
    plan, state = subject
    call = calling(program, lambda *args, **kwargs: plan(args, kwargs), lambda: state)
    try:
        with attempt("calls of ONNX Runtime"):
            state.clear()
            got = observed(program, model, calls, call, lambda: state)
    except ExportFailed as refusal:
        return compared(replace(result, error=f"raises {first_line(refusal.error)}"))
    least = rounding(bundle, program.name)
    differences = compare(calls.expected, got, least=least, eager_errors=calls.eager_errors)
    found = compared(replace(result, differences=differences))
    if model.updates or all(comparison.agrees for comparison in found):
        return found
    outputs = dict(call(calls.values))
    return [_tie(bundle, program, calls, outputs, one) for one in found]


def _tie(
    bundle: Bundle, program: Program, calls: Calls, outputs: Mapping[str, Any], comparison: Comparison
) -> Comparison:
    """Return the comparison; it agrees if only indices of equal values differ."""
    path = comparison.name.partition(": ")[2].removesuffix(NORM).removesuffix(NORMS)
    if comparison.agrees or comparison.detail or path not in outputs:
        return comparison
    if not _is_tie(bundle, program, calls.values, path, outputs[path]):
        return comparison
    same = {"error": 0.0, "absolute": 0.0, "agrees": True, "detail": "other indices, of equal values"}
    return replace(comparison, name=f"{comparison.name} (of equal values)", **same)


def _is_tie(bundle: Bundle, program: Program, values: Sequence[Any], path: str, got: Any) -> bool:
    """Return whether ONNX Runtime's output of a call is indices in another order than torch's of equal values alone."""
    apart, graph, tensors = plain(bundle, program)
    places = {at: leaf.index for at, leaf in leaves(program.output_tree, "output") if isinstance(leaf, Leaf)}
    index = places.get(path)
    if index is None or (order := _order(graph, graph.outputs[index])) is None:
        return False
    value, meta, axis = order
    alone = msgspec.structs.replace(graph, outputs=[value, graph.outputs[index]])
    record = msgspec.structs.replace(apart, outputs=(meta, program.outputs[index]))
    namespaces = bundle.manifest.requirements.operator_namespaces
    with torch.no_grad():
        ordered, expected, *_ = Rebuilt(record, alone, tensors, namespaces=namespaces)(*values)
    got = torch.as_tensor(got)
    if expected.dtype != torch.int64 or (got.dtype, got.shape) != (expected.dtype, expected.shape) or not got.numel():
        return False
    return _fits(got, ordered, axis) and torch.equal(ordered.gather(axis, expected), ordered.gather(axis, got))


def _fits(indices: torch.Tensor, ordered: torch.Tensor, axis: int) -> bool:
    """Return whether indices are positions along an axis, each at most once."""
    if int(indices.min()) < 0 or int(indices.max()) >= ordered.shape[axis]:
        return False
    steps = indices.sort(axis).values.diff(dim=axis)
    return bool((steps > 0).all())


def _order(graph: Graph, output: Any) -> tuple[str, TensorMeta, int] | None:
    """Return the value of the graph, with its metadata, that an output of indices orders along an axis."""
    node = order_of(graph, output)
    if node is None:
        return None
    value: Any = node.args[0]
    meta: Any = metas_of(graph)[value]
    axis: Any = node.args[ORDERS[node.op]] if len(node.args) > ORDERS[node.op] else node.kwargs.get("dim", -1)
    return (value, meta, axis) if meta.shape else None


NARROW, WIDE = ir.DataType.BFLOAT16, ir.DataType.FLOAT
_DTYPE_ATTRIBUTES = ("to", "dtype", "output_dtype")


def _is_narrow(path: Path) -> bool:
    graph = ir.load(path).graph
    computed = [value for node in graph.all_nodes() for value in node.outputs]
    return any(value.dtype == NARROW for value in (*graph.inputs, *graph.initializers.values(), *computed))


def _widened(bundle: Bundle, written: OnnxModel, directory: Path) -> Bundle:
    """Return a copy of a bundle whose model computes in float32 instead; its inputs and outputs stay as they are."""
    # A copy: a file may have further hard links, which readers of external data refuse.
    copied = shutil.copytree(bundle.root, directory / "bundle", copy_function=shutil.copyfile)
    model = ir.load(copied / written.file)
    graph = model.graph
    inputs = [value for value in graph.inputs if value.dtype == NARROW]
    outputs = [value for value in graph.outputs if value.dtype == NARROW]
    for node in list(graph.all_nodes()):
        for name, attribute in list(node.attributes.items()):
            node.attributes[name] = _wide(attribute)
        for value in node.outputs:
            _widen(value)
    for value in graph.initializers.values():
        if value.const_value is not None and value.dtype == NARROW and value not in inputs:
            value.const_value = ir.tensor(value.const_value.numpy().astype(np.float32), name=value.name)
            _widen(value)
    for value in inputs:
        cast = _cast(value, WIDE, f"{value.name}:wide")
        ir.convenience.replace_all_uses_with(value, cast.outputs[0])
        cast.replace_input_with(0, value)
        graph.insert_before(graph[0], cast)
    for value in outputs:
        name, value.name = value.name, f"{value.name}:wide"
        cast = _cast(value, NARROW, str(name))
        graph.append(cast)
        graph.outputs[graph.outputs.index(value)] = cast.outputs[0]
    ir.save(model, copied / written.file, external_data="model.data")
    list_again(copied, msgspec.structs.replace(bundle.manifest, files=()))
    return open_bundle(copied, check_digests=False)


def _widen(value: ir.Value) -> None:
    if value.dtype == NARROW:
        value.dtype = WIDE


def _wide(attribute: ir.Attr) -> ir.Attr:
    """Return an attribute with float32 in place of bfloat16, as its dtype or its tensor's."""
    if attribute.name in _DTYPE_ATTRIBUTES and attribute.value == NARROW:
        return ir.AttrInt64(attribute.name, WIDE)
    value: Any = attribute.value
    if attribute.type == ir.AttributeType.TENSOR and value.dtype == NARROW:
        return ir.AttrTensor(attribute.name, ir.tensor(value.numpy().astype(np.float32)))
    return attribute


def _cast(value: ir.Value, dtype: ir.DataType, name: str) -> ir.Node:
    attributes = [ir.AttrInt64("to", dtype)]
    output = ir.Value(name=name, shape=value.shape, type=ir.TensorType(dtype))
    return ir.Node("", "Cast", [value], attributes, outputs=[output], name=f"{name}:cast")
