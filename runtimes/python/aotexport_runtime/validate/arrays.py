"""Rules of NumPy arrays among arguments and results."""

from __future__ import annotations

from collections.abc import Iterable

from aotexport_runtime.errors import Place
from aotexport_runtime.schema.program import ArgumentInput, Program
from aotexport_runtime.schema.trees import Leaf, Tree
from aotexport_runtime.schema.values import TensorMeta
from aotexport_runtime.values.trees import arrays_in, leaves

_DTYPES = frozenset(
    (
        *("bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64"),
        *("float16", "float32", "float64", "complex64", "complex128"),
    )
)
"""Element types that torch and NumPy both have."""


def check_arrays(program: Program, where: Place) -> None:
    """Refuse arrays that no call can pass or return.

    Raises:
        BundleInvalid: names the fault.
    """
    for index in _arrays([parameter.tree for parameter in program.parameters], "input", where):
        spec = program.inputs[index]
        if not isinstance(spec, ArgumentInput) or spec.subclass is not None or spec.meta.requires_grad:
            raise where.invalid(
                f"input {index} is an array, and no plain argument without gradients", "structure-malformed/array-input"
            )
        _check_meta(spec.meta, f"input {index}", where)
    put = [item for change in program.container_changes for item in change.items if item is not None]
    for index in _arrays([program.output_tree, *put], "output", where):
        _check_meta(program.outputs[index], f"output {index}", where)


def _arrays(trees: Iterable[Tree], subject: str, where: Place) -> list[int]:
    """Return the indices of the leaves that are arrays, in order; refuse one that is also the index of another leaf."""
    trees = list(trees)
    arrays = arrays_in(trees)
    found = [leaf for tree in trees for _, leaf in leaves(tree) if isinstance(leaf, Leaf) and leaf.index in arrays]
    for leaf in found:
        if not leaf.array:
            raise where.invalid(
                f"{subject} {leaf.index} is an array in one place, and none in another",
                "structure-malformed/array-mixed",
            )
    return sorted(arrays)


def _check_meta(meta: TensorMeta | None, subject: str, where: Place) -> None:
    if meta is None or meta.dtype not in _DTYPES:
        raise where.invalid(f"{subject} is an array, and NumPy has no such values", "structure-malformed/array-dtype")
