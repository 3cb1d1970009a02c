"""Tensors of wrapper subclasses: their class, which no reader imports, and the tensors that they are made of."""

from __future__ import annotations

from typing import Annotated

from aotexport_runtime.schema.bounded import ClassName, Length, Record, Unique
from aotexport_runtime.schema.sizes import Size
from aotexport_runtime.schema.trees import Tree

DTENSOR = "torch.distributed.tensor:DTensor"
"""`Subclass.type` of distributed tensors."""


class Subclass(Record, kw_only=True):
    """The structure of one tensor of a wrapper subclass; its parts, depth first, are listed where the record is used.

    Attributes:
        type: its class, `module:qualified.name`.
        attributes: names of the inner tensors, in the order of `__tensor_flatten__`.
        inner: structure per inner tensor; None: a plain tensor, one part.
        context: the second result of `__tensor_flatten__`; a tree without leaves.
        shape: size per axis of the whole.
        stride: step per axis of the whole, in elements.
    """

    type: ClassName
    attributes: Annotated[tuple[str, ...], Unique()]
    inner: Annotated[tuple[Subclass | None, ...], Length("Subclass.attributes", "structure-malformed")]
    context: Tree
    shape: tuple[Size, ...]
    stride: tuple[Size, ...]
