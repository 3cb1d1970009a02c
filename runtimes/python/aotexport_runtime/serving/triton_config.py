"""The `config.pbtxt` of a bundle for Triton's Python backend (`examples/serving/triton/model.py`)."""

from __future__ import annotations

import json
from collections.abc import Iterable

from aotexport_runtime.errors import NotSupported
from aotexport_runtime.serving.interface import BatchAxes, TensorSpec

_TYPES = {
    "bool": "TYPE_BOOL",
    "float16": "TYPE_FP16",
    "bfloat16": "TYPE_FP32",
    "float32": "TYPE_FP32",
    "float64": "TYPE_FP64",
    **{f"int{bits}": f"TYPE_INT{bits}" for bits in (8, 16, 32, 64)},
    **{f"uint{bits}": f"TYPE_UINT{bits}" for bits in (8, 16, 32, 64)},
}
"""Types by dtype. Arrays of numpy, as the backend has, know no bfloat16; a servable takes float32 for it."""


def triton_config(
    name: str,
    inputs: Iterable[TensorSpec],
    outputs: Iterable[TensorSpec],
    batch: BatchAxes | None,
    *,
    max_batch_size: int = 32,
) -> str:
    """Return the text of a `config.pbtxt`.

    Triton gathers requests to batches where the calls of the bundle may be joined along the first axis of every input
    and output.

    Args:
        name: of the model, which is that of its directory.
        inputs: a servable's.
        outputs: a servable's.
        batch: a servable's `batch_axes`, after `warm_up`.
        max_batch_size: greatest size of a batch, at most the bundle's.

    Raises:
        NotSupported: an input or output is of a dtype that Triton's Python backend has no type for.
    """
    joins = batch is not None and not any((*batch.inputs, *batch.outputs))
    size = 0 if batch is None or not joins else min(max_batch_size, batch.most or max_batch_size)
    lines = [f"name: {json.dumps(name)}", 'backend: "python"', f"max_batch_size: {size}"]
    for kind, specs in (("input", inputs), ("output", outputs)):
        lines += [f"{kind} [", ",\n".join(f"  {_tensor(spec, joined=joins)}" for spec in specs), "]"]
    lines += ["dynamic_batching { }"] if joins else []
    return "\n".join([*lines, "instance_group [ { kind: KIND_CPU count: 1 } ]", ""])


def _tensor(spec: TensorSpec, *, joined: bool) -> str:
    if spec.dtype not in _TYPES:
        raise NotSupported(f"`{spec.name}`: Triton's Python backend has no tensors of {spec.dtype}")
    shape = spec.shape[1:] if joined else spec.shape
    # Triton takes no empty `dims`: a tensor of no axes is declared as one of one element, and given its shape again.
    dims = f"dims: [ {', '.join(map(str, shape))} ]" if shape else "dims: [ 1 ] reshape { shape: [ ] }"
    return f"{{ name: {json.dumps(spec.name)} data_type: {_TYPES[spec.dtype]} {dims} }}"
