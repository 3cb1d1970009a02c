"""What compiled code takes from metadata, which may be false: dtypes that rules prove, and shapes that it compares.

Metadata of what no rule proves come from torch's own shape functions, and not all of these tell what kernels give.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch

from aotexport_runtime.allowed.operators import aten_signatures
from aotexport_runtime.errors import BundleInvalid
from aotexport_runtime.rewrite.names import operands
from aotexport_runtime.schema.graph import Node
from aotexport_runtime.schema.values import ValueMeta
from aotexport_runtime.validate.dtypes import result_dtypes


def of_proven_dtype(inputs: Iterable[str], nodes: Iterable[Node], metas: Mapping[str, ValueMeta]) -> set[str]:
    """Return the values whose dtype follows from those of inputs.

    Args:
        inputs: names of values whose dtype each call checks.
        nodes: functional operators.
        metas: metadata of their arguments.
    """
    found = set(inputs)
    for node in nodes:
        if node.name in found:
            continue
        schema = aten_signatures().get(node.op.removeprefix("aten::"))
        follows = node.op == "python::getitem" or result_dtypes(node, schema, metas) is not None
        if follows and found.issuperset(operands(node)):
            found.add(node.name)
    return found


def check_shape(tensor: torch.Tensor, sizes: Sequence[int]) -> None:
    """Refuse a tensor of other sizes than these; -1: any.

    Raises:
        BundleInvalid: names both.
    """
    shape = tensor.shape
    if shape != tuple(sizes) and (
        len(shape) != len(sizes) or any(size not in (-1, found) for size, found in zip(sizes, shape, strict=True))
    ):
        raise BundleInvalid(
            f"a value of a graph has the shape {list(shape)}, and its metadata say {list(sizes)}",
            check="result-type/shape",
        )
