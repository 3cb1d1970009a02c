"""Encode arguments of operators and metadata of values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
import torch

from aotexport.errors import ExportFailed
from aotexport.torch_internals.checks import is_data_dependent
from aotexport.values.sizes import encode_size
from aotexport_runtime.schema.values import (
    Argument,
    NothingMeta,
    ScalarMeta,
    SequenceMeta,
    SizeArgument,
    SizeMeta,
    TensorMeta,
    ValueMeta,
)
from aotexport_runtime.values.structure import encode_constant, is_constant


def encode_argument(value: Any, name_of: Mapping[torch.fx.Node, Argument], where: str) -> Argument:
    """Return the record of an operator's argument; `ExportFailed`: the format does not have its kind.

    `name_of` has the name of each earlier node, a subgraph for nodes that hold one; `where` is the node, for errors.
    """
    if isinstance(value, torch.fx.Node):
        return name_of[value]
    if isinstance(value, tuple | list):
        return [encode_argument(item, name_of, where) for item in value]
    if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
        if is_data_dependent(value):
            raise ExportFailed(f"{where} takes a number that only the data know, and that no value of the graph is")
        return SizeArgument(value=encode_size(value))
    if is_constant(value):
        return encode_constant(value)
    raise ExportFailed(f"{where} has an argument of type `{type(value).__name__}`, which a bundle cannot hold")


def encode_meta(value: Any) -> ValueMeta:
    """Return the metadata record of a traced value (`node.meta['val']`)."""
    if value is None:
        return NothingMeta()
    if isinstance(value, torch.Tensor):
        return encode_result_meta(value)
    if isinstance(value, torch.SymInt | torch.SymBool) or type(value) is int:
        return SizeMeta(value=encode_size(value, or_none=True))
    if isinstance(value, torch.SymFloat):
        return ScalarMeta(type="float")
    if isinstance(value, bool | float):
        return ScalarMeta(type="bool" if isinstance(value, bool) else "float")
    if isinstance(value, tuple | list):
        return SequenceMeta(items=tuple(encode_meta(item) for item in value))
    raise ExportFailed(f"a traced value of type `{type(value).__name__}` is not supported")


def encode_result_meta(value: torch.Tensor) -> TensorMeta:
    """Return the metadata record of a result, without its offset in its storage, on which nothing may rely."""
    return msgspec.structs.replace(encode_tensor_meta(value), offset=0)


def encode_tensor_meta(value: torch.Tensor) -> TensorMeta:
    """Return the metadata record of a tensor; `ExportFailed`: not a strided tensor."""
    if value.layout is not torch.strided:
        raise ExportFailed(f"a tensor of layout {value.layout} is not supported; use strided tensors")
    return TensorMeta(
        dtype=str(value.dtype).removeprefix("torch."),  # type: ignore[arg-type]
        shape=tuple(encode_size(size) for size in value.shape),
        stride=tuple(encode_size(step) for step in value.stride()),
        offset=encode_size(value.storage_offset()),
        device=value.device.type,  # type: ignore[arg-type]
        requires_grad=value.requires_grad,
    )
