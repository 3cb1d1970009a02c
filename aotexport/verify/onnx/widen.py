"""Turn a model of bfloat16 into one of float32, to verify it where ONNX Runtime has no kernels of bfloat16."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

NARROW, WIDE = ir.DataType.BFLOAT16, ir.DataType.FLOAT
_DTYPE_ATTRIBUTES = ("to", "dtype", "output_dtype")


def is_narrow(path: Path) -> bool:
    """Return whether the model at `path` computes in bfloat16."""
    graph = ir.load(path).graph
    computed = [value for node in graph.all_nodes() for value in node.outputs]
    return any(value.dtype == NARROW for value in (*graph.inputs, *graph.initializers.values(), *computed))


def write_wide(path: Path, directory: Path) -> Path:
    """Write the model at `path` with float32 in place of bfloat16; its inputs and outputs stay as they are.

    Args:
        path: of the model.
        directory: to write to.

    Returns:
        The path of the new model.
    """
    # A copy: a file may have further hard links, which readers of external data refuse.
    copied = shutil.copytree(path.parent, directory / "bundle", copy_function=shutil.copyfile)
    model = ir.load(copied / path.name)
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
    target = directory / "model.onnx"
    ir.save(model, target, external_data="model.data")
    return target


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
