"""A model and its example inputs in another floating dtype."""

from __future__ import annotations

import copy
import dataclasses
import itertools
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from aotexport.model.programs import AnyExample, Example, Program, as_example
from aotexport.model.source import ModelSource
from aotexport.model.structure import is_plain_object, object_attributes
from aotexport.torch_internals.calls import tree_map


def cast(source: ModelSource, dtype: torch.dtype) -> ModelSource:
    """Return `source` with floating parameters, buffers and example inputs in `dtype`.

    The module is changed in place; ties stay ties. Integers, booleans and complex numbers are left alone, and so are
    tensors that are neither parameter nor buffer. Tensors in attributes of example inputs (of dataclasses, of caches)
    are inputs as well: an object that holds one is copied.
    """
    if isinstance(source.target, nn.Module):
        for tensor in itertools.chain(source.target.parameters(), source.target.buffers()):
            if tensor.is_floating_point():
                tensor.data = tensor.data.to(dtype)
    leaves = _Leaves(dtype)

    def recast(example: AnyExample) -> Example:
        example = as_example(example)
        args, kwargs = tree_map(leaves.cast, (tuple(example.args), dict(example.kwargs)))
        return dataclasses.replace(example, args=args, kwargs=kwargs)

    def described(program: str | Program) -> str | Program:
        if isinstance(program, str):
            return program
        example = None if program.example is None else recast(program.example)
        return dataclasses.replace(program, example=example, variants=tuple(map(recast, program.variants)))

    return dataclasses.replace(
        source,
        example=recast(source.example),
        variants=tuple(map(recast, source.variants)),
        programs=None if source.programs is None else tuple(map(described, source.programs)),
    )


def cast_arguments(args: Iterable[Any], kwargs: Mapping[str, Any], dtype: torch.dtype) -> Any:
    """Return the arguments of a call with floating tensors in `dtype`, as `cast` does."""
    return tree_map(_Leaves(dtype).cast, (tuple(args), dict(kwargs)))


class _Leaves:
    """Casts leaves of example inputs; one tensor or object passed twice stays one."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._done: dict[int, Any] = {}
        self._casts = 0

    def cast(self, value: object) -> object:
        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        is_record = dataclasses.is_dataclass(value) and not isinstance(value, type)
        return self._object(value) if is_record or is_plain_object(value) else value

    def _tensor(self, value: torch.Tensor) -> torch.Tensor:
        if not value.is_floating_point() or value.dtype == self._dtype:
            return value
        self._casts += 1
        if id(value) not in self._done:
            self._done[id(value)] = value.detach().to(self._dtype).requires_grad_(value.requires_grad)
        return self._done[id(value)]

    def _object(self, value: Any) -> Any:
        """Return a copy whose attributes are cast; the object itself, if it holds nothing to cast."""
        if id(value) in self._done:
            self._casts += self._done[id(value)] is not value
            return self._done[id(value)]
        self._done[id(value)] = value  # An object that holds itself ends here.
        before = self._casts
        cast = {name: tree_map(self.cast, item) for name, item in object_attributes(value).items()}
        if self._casts == before:
            return value
        self._done[id(value)] = other = copy.copy(value)
        for name, item in cast.items():
            object.__setattr__(other, name, item)
        return other
