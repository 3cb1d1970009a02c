"""The config of a model as Triton's clients read it, and as the `config.pbtxt` of Triton's Python backend."""

from __future__ import annotations

import json
from typing import Any

from aotexport_runtime.server.messages import Signature
from aotexport_runtime.serving.interface import BatchAxes


def model_config(
    name: str, signature: Signature, batch: BatchAxes | None, max_batch_size: int, backend: str
) -> dict[str, Any]:
    """Return the config of a model, with the `batch_axes` of its servable after `warm_up`.

    Requests are gathered to batches where they may be joined along the first axis of every input and output.
    """
    joins = batch is not None and not any((*batch.inputs, *batch.outputs))
    size = 0 if batch is None or not joins else min(max_batch_size, batch.most or max_batch_size)
    config: dict[str, Any] = {"name": name, "backend": backend, "max_batch_size": size}
    for kind, tensors in (("input", signature.inputs), ("output", signature.outputs)):
        config[kind] = [_tensor(name, *tensor, joined=joins) for name, tensor in tensors.items()]
    config |= {"dynamic_batching": {}} if joins else {}
    return config | {"instance_group": [{"kind": "KIND_CPU", "count": 1}]}


def _tensor(name: str, datatype: str, shape: tuple[int, ...], *, joined: bool) -> dict[str, Any]:
    dims = [*shape[1:]] if joined else [*shape]
    found = {"name": name, "data_type": f"TYPE_{'STRING' if datatype == 'BYTES' else datatype}"}
    # Triton takes no empty `dims`: a tensor of no axes is declared as one of one element, and given its shape again.
    return found | ({"dims": dims} if dims else {"dims": [1], "reshape": {"shape": []}})


def config_text(config: dict[str, Any]) -> str:
    """Return a config as the text of a `config.pbtxt`.

    Arrays of numpy, as the backend has, know no bfloat16; a servable takes float32 for it.
    """
    return "".join(f"{_field(name, value)}\n" for name, value in config.items())


def _field(name: str, value: Any) -> str:
    if isinstance(value, dict):
        return f"{name} {_message(value)}"
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return f"{name} [\n" + ",\n".join(f"  {_message(each)}" for each in value) + "\n]"
    is_enum = name in ("data_type", "kind")
    return f"{name}: {str(value).replace('BF16', 'FP32') if is_enum else json.dumps(value)}"


def _message(value: dict[str, Any]) -> str:
    return " ".join(["{", *(_field(name, each) for name, each in value.items()), "}"])
