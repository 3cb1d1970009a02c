"""A model and its example inputs in another floating dtype."""

from __future__ import annotations

import dataclasses
import itertools

import torch
from torch import nn

from aotexport.model.programs import AnyExample, Example, Program, as_example
from aotexport.model.source import ModelSource
from aotexport.torch_internals.calls import tree_map


def cast(source: ModelSource, dtype: torch.dtype) -> ModelSource:
    """Return `source` with floating parameters, buffers and example inputs in `dtype`.

    The module is changed in place; ties stay ties. Integers, booleans and complex numbers are left alone, and so are
    tensors that are neither parameter nor buffer.
    """
    if isinstance(source.target, nn.Module):
        for tensor in itertools.chain(source.target.parameters(), source.target.buffers()):
            if tensor.is_floating_point():
                tensor.data = tensor.data.to(dtype)
    done: dict[int, torch.Tensor] = {}

    def leaf(value: object) -> object:
        if not isinstance(value, torch.Tensor) or not value.is_floating_point() or value.dtype == dtype:
            return value
        # One tensor passed twice stays one tensor.
        if id(value) not in done:
            done[id(value)] = value.detach().to(dtype).requires_grad_(value.requires_grad)
        return done[id(value)]

    def recast(example: AnyExample) -> Example:
        example = as_example(example)
        args, kwargs = tree_map(leaf, (tuple(example.args), dict(example.kwargs)))
        return dataclasses.replace(example, args=args, kwargs=kwargs)

    def described(program: str | Program) -> str | Program:
        if isinstance(program, str):
            return program
        example = None if program.example is None else recast(program.example)
        return dataclasses.replace(program, example=example, variants=tuple(map(recast, program.variants)))

    example = recast(source.example)
    return dataclasses.replace(
        source,
        args=tuple(example.args),
        kwargs=dict(example.kwargs),
        variants=tuple(map(recast, source.variants)),
        programs=None if source.programs is None else tuple(map(described, source.programs)),
    )
