"""Initialisers of an ONNX model in the bundle's safetensors files: weights are on disk once."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
from safetensors.numpy import save_file

from aotexport.lower.onnx.translate import INLINE_NBYTES
from aotexport.write.weights import tensor_ranges
from aotexport_runtime.schema.manifest import StateTensor, StoredPart


def attach_state(
    model: ir.Model,
    state: Mapping[str, str],
    entries: Mapping[str, StateTensor | StoredPart],
    root: Path,
    *,
    changing: Collection[str] = (),
) -> dict[str, str]:
    """Turn the inputs for state tensors into initialisers that lie in the bundle's files below `root`.

    The model is changed. `state` has the name of the state tensor per input, `entries` the manifest's entries and their
    parts by name. Initialisers of the tensors in `changing` stay inputs too, so that a caller may give other values.

    Returns:
        The names of these inputs, by state tensor.
    """
    graph = model.graph
    remaining_inputs: dict[str, str] = {}
    headers: dict[str, dict[str, tuple[int, int]]] = {}
    taken = {value.name for value in [*graph.inputs, *graph.outputs] if value.name not in state}
    values = [value for value in graph.inputs if value.name in state]
    for value in values:
        graph.inputs.remove(value)
        if not value.uses():
            continue
        name = state[str(value.name)]
        entry = entries[name]
        value.name = name if name not in taken else f"state.{name}"
        if entry.file not in headers:
            headers[entry.file] = tensor_ranges(root.joinpath(*entry.file.split("/")))
        value.const_value = _external(value, entry, headers[entry.file][entry.key], root)
        graph.initializers[value.name] = value
        if name in changing:
            graph.inputs.append(value)
            remaining_inputs[name] = value.name
    return remaining_inputs


def _external(value: ir.Value, entry: StateTensor | StoredPart, where: tuple[int, int], root: Path) -> Any:
    assert value.shape is not None
    assert value.dtype is not None
    shape = [int(size) for size in value.shape]  # type: ignore[arg-type]
    nbytes = math.prod(shape) * value.dtype.itemsize
    if nbytes == 0:
        return ir.tensor(np.zeros(shape, value.dtype.numpy()), name=value.name)
    # A complex element is two numbers in the model.
    width = value.dtype.itemsize * (2 if entry.dtype.startswith("complex") else 1)
    return ir.ExternalTensor(
        entry.file,
        where[0] + entry.offset * int(width),
        int(nbytes),
        value.dtype,
        shape=ir.Shape(shape),
        name=str(value.name),
        base_dir=root,
    )


def attach_constants(model: ir.Model, file: str, root: Path) -> None:
    """Move constants above `INLINE_NBYTES` to the safetensors file `file` of the bundle at `root`, if there are any."""
    large: dict[str, ir.Value] = {}
    for value in model.graph.initializers.values():
        constant = value.const_value
        if constant is not None and not isinstance(constant, ir.ExternalTensor) and constant.nbytes > INLINE_NBYTES:
            large[str(value.name)] = value
    if not large:
        return
    path = root.joinpath(*file.split("/"))
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file({name: _padded(value) for name, value in sorted(large.items())}, path)
    ranges = tensor_ranges(path)
    for name, value in large.items():
        constant = value.const_value
        assert constant is not None
        assert value.shape is not None
        value.const_value = ir.ExternalTensor(
            file,
            ranges[name][0],
            constant.nbytes,
            constant.dtype,
            shape=value.shape,
            name=name,
            base_dir=root,
        )


def _padded(value: ir.Value) -> np.ndarray[Any, Any]:
    """Return the bytes of a constant, padded to a multiple of 8."""
    assert value.const_value is not None
    data = value.const_value.tobytes()
    return np.frombuffer(data + bytes(-len(data) % 8), np.uint8)
