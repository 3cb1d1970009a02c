"""Batch normalisation by the batch's own statistics, which torch's exporter translates wrongly."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from aotexport.lower.onnx.form import Call, Metas

aten = torch.ops.aten


def batch_norm(call: Call, args: list[Any], kwargs: Mapping[str, Any], metas: Metas) -> fx.Node:
    """Return a batch normalisation; in training by single steps, which also write the running statistics."""
    value, weight, bias, running_mean, running_var, training, momentum, eps, _ = args
    if not training:
        return call(aten.batch_norm.default, *args, **kwargs)
    meta = metas[0]
    assert meta is not None
    narrow = meta.dtype in ("float16", "bfloat16")
    wide = call(aten._to_copy.default, value, dtype=torch.float32) if narrow else value
    axes = [axis for axis in range(len(meta.shape)) if axis != 1]
    mean = call(aten.mean.dim, wide, axes, True)
    centered = call(aten.sub.Tensor, wide, mean)
    variance = call(aten.mean.dim, call(aten.mul.Tensor, centered, centered), axes, True)
    result = call(aten.mul.Tensor, centered, call(aten.rsqrt.default, call(aten.add.Scalar, variance, eps)))
    for function, factor in ((aten.mul.Tensor, weight), (aten.add.Tensor, bias)):
        if factor is not None:
            result = call(function, result, call(aten.reshape.default, factor, [-1] + [1] * (len(axes) - 1)))
    if running_mean is not None:
        seen = (mean, call(aten.var.correction, wide, axes, correction=1))
        for running, batch in zip((running_mean, running_var), seen, strict=True):
            previous = call(aten.mul.Scalar, running, 1 - momentum)
            new = call(aten.mul.Scalar, call(aten.reshape.default, batch, [-1]), momentum)
            call(aten.copy_.default, running, call(aten.add.Tensor, previous, new))
    return call(aten._to_copy.default, result, dtype=getattr(torch, meta.dtype)) if narrow else result
