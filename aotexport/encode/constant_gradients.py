"""Find gradients that are the same for every tangent, in joint graphs of several outputs.

Eager's backward pass from some outputs visits only the operators before those; the tangents that a term of a joint
graph is computed from tell its outputs. A term computed from no tangent would be added in every pass.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from aotexport_runtime.rewrite.names import names_in, operands
from aotexport_runtime.schema.gradients import Gradients
from aotexport_runtime.schema.graph import Graph, Node
from aotexport_runtime.schema.values import TensorMeta
from aotexport_runtime.validate import descendants

_SUMS = frozenset(
    f"aten::{name}"
    for name in ("add.Tensor", "sub.Tensor", "addmm.default", "addmv.default", "baddbmm.default", "addcmul.default")
)
"""Operators that add to their first operand."""

_PLACES = frozenset(
    f"aten::{name}"
    for name in (
        *("cat.default", "stack.default", "where.self", "index_put.default", "index_add.default", "scatter.src"),
        *("scatter_add.default", "slice_scatter.default", "select_scatter.default", "as_strided_scatter.default"),
    )
)
"""Operators that place operands beside each other: zeros among these are places that a gradient does not reach."""

_BOTH = re.compile(r"aten::(add|sub)\.Tensor|aten::(slice|select|as_strided)_scatter\.default")
"""Those among them that take two operands so."""

_ZEROS = frozenset(f"aten::{name}" for name in ("zeros.default", "zeros_like.default", "new_zeros.default"))
_FILLED = frozenset(f"aten::{name}" for name in ("full.default", "full_like.default", "new_full.default"))


def constant_gradient(graph: Graph, gradients: Gradients) -> str | None:
    """Return the value in a joint graph that is a gradient, or a term of one, and depends on no tangent.

    Returns:
        Its name; None: there is none, or there is one tangent only, so that every pass has it.
    """
    if len(gradients.tangents) < 2:
        return None
    tangents = {value.name for value in graph.inputs[len(gradients.of_inputs) :]}
    derived, zeros = descendants(graph.nodes, tangents), _zeros(graph.nodes)
    floating = {
        value.name
        for value in (*graph.inputs, *graph.nodes)
        if isinstance(value.meta, TensorMeta) and value.meta.dtype.startswith(("float", "bfloat", "complex"))
    }
    for node in graph.nodes:
        if node.name not in derived or node.name not in floating or node.op not in _SUMS | _PLACES:
            continue
        for name in _terms(node):
            if name in floating - derived and not (node.op in _PLACES and name in zeros):
                return name
    ends = (graph.outputs[index] for index in gradients.of_inputs if index is not None)
    return next((end for end in ends if isinstance(end, str) and end not in derived), None)


def _terms(node: Node) -> list[str]:
    """Return the operands that a node of `_SUMS` or `_PLACES` adds or places unchanged."""
    taken = node.args[1:] if node.op == "aten::where.self" else node.args[: 2 if _BOTH.fullmatch(node.op) else 1]
    return names_in(taken)


def _zeros(nodes: Sequence[Node]) -> set[str]:
    """Return the values that are zeros in every call: made as zeros, or computed from zeros alone."""
    found: set[str] = set()
    for node in nodes:
        made = node.op in _ZEROS or (node.op in _FILLED and node.args[1] == 0)
        made = made or (node.op == "aten::scalar_tensor.default" and node.args[0] == 0)
        if made or (operands(node) and found.issuperset(operands(node))):
            found.add(node.name)
    return found
