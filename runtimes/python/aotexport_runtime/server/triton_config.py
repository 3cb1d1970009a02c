"""The `config.pbtxt` of a bundle for Triton's Python backend (`examples/serving/triton/model.py`)."""

from __future__ import annotations

import json

from aotexport_runtime.server.tensors import datatype_of
from aotexport_runtime.serving.interface import BatchAxes, TensorSpec


def triton_config(
    name: str,
    inputs: tuple[TensorSpec, ...],
    outputs: tuple[TensorSpec, ...],
    batch: BatchAxes | None,
    *,
    max_batch_size: int = 32,
) -> str:
    """Return the text of a `config.pbtxt` for a servable's inputs and outputs, and its `batch_axes` after `warm_up`.

    Triton gathers requests to batches where calls may be joined along the first axis of every input and output.

    Raises:
        NotSupported: an input or output is of a dtype that the protocol lacks.
    """
    joins = batch is not None and not any((*batch.inputs, *batch.outputs))
    size = 0 if batch is None or not joins else min(max_batch_size, batch.most or max_batch_size)
    lines = [f"name: {json.dumps(name)}", 'backend: "python"', f"max_batch_size: {size}"]
    for kind, specs in (("input", inputs), ("output", outputs)):
        lines += [f"{kind} [", ",\n".join(f"  {_tensor(spec, joined=joins)}" for spec in specs), "]"]
    lines += ["dynamic_batching { }"] if joins else []
    return "\n".join([*lines, "instance_group [ { kind: KIND_CPU count: 1 } ]", ""])


def _tensor(spec: TensorSpec, *, joined: bool) -> str:
    # Arrays of numpy, as the backend has, know no bfloat16; a servable takes float32 for it.
    datatype = datatype_of(spec.name, spec.dtype).replace("BF16", "FP32")
    shape = spec.shape[1:] if joined else spec.shape
    # Triton takes no empty `dims`: a tensor of no axes is declared as one of one element, and given its shape again.
    dims = f"dims: [ {', '.join(map(str, shape))} ]" if shape else "dims: [ 1 ] reshape { shape: [ ] }"
    return f"{{ name: {json.dumps(spec.name)} data_type: TYPE_{datatype} {dims} }}"
