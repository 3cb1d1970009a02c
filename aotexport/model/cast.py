"""A model and its example inputs in another floating dtype."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from aotexport.model.programs import AnyExample, Example, ModelSource, Program, as_example
from aotexport.model.structure import flattened


def cast(source: ModelSource, dtype: torch.dtype) -> ModelSource:
    """Return `source` with floating parameters, buffers and example inputs in `dtype`.

    The module is changed in place; ties stay ties. Integers, booleans and complex numbers are left alone, and so are
    tensors that are neither parameter nor buffer.
    """
    if isinstance(source.target, nn.Module):
        for tensor in itertools.chain(source.target.parameters(), source.target.buffers()):
            if tensor.is_floating_point():
                tensor.data = tensor.data.to(dtype)

    def recast(example: AnyExample) -> Example:
        example = as_example(example)
        args, kwargs = cast_arguments(example.args, example.kwargs, dtype)
        return replace(example, args=args, kwargs=kwargs)

    def described(program: str | Program) -> str | Program:
        if isinstance(program, str):
            return program
        example = None if program.example is None else recast(program.example)
        return replace(program, example=example, variants=tuple(map(recast, program.variants)))

    return replace(
        source,
        example=recast(source.example),
        variants=tuple(map(recast, source.variants)),
        programs=None if source.programs is None else tuple(map(described, source.programs)),
    )


def cast_arguments(args: Iterable[Any], kwargs: Mapping[str, Any], dtype: torch.dtype) -> Any:
    """Return copies of a call's arguments with floating tensors, also those in attributes of objects, in `dtype`."""
    arguments = tuple(args), dict(kwargs)
    memo: dict[int, Any] = {}
    for leaf in flattened(arguments, "arguments", role="input")[1]:
        if isinstance(leaf, torch.Tensor):
            cast = leaf.is_floating_point() and leaf.dtype != dtype
            memo[id(leaf)] = leaf.detach().to(dtype).requires_grad_(leaf.requires_grad) if cast else leaf
    return copy.deepcopy(arguments, memo)
