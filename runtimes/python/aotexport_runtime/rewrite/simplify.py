"""Removes calls that change nothing from subgraphs of functional operators. Data only, no torch.

AOTAutograd's formulas transpose twice, and detach where nothing records. Distinct outputs of a subgraph stay distinct
tensors, since callers can see that.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from aotexport_runtime.rewrite.names import names_in, rename, renamed
from aotexport_runtime.rewrite.partition import Subgraph, ancestors
from aotexport_runtime.schema.graph import Node
from aotexport_runtime.schema.values import TensorMeta, ValueMeta

_IDENTITIES = frozenset(("aten::detach.default", "aten::alias.default"))
_INVOLUTIONS = frozenset(("aten::t.default", "aten::transpose.int"))


def simplified(subgraph: Subgraph, metas: Mapping[str, ValueMeta]) -> Subgraph:
    """Return `subgraph` without the calls that change nothing; `metas`: of all its values."""
    returned = set(names_in(subgraph.outputs))
    alias: dict[str, str] = {}
    made: dict[str, Node] = {}
    for node in subgraph.nodes:
        node = renamed(node, alias) if alias else node
        same = _equal_value(node, made)
        if same is not None and node.name in returned:
            # A removed output may be replaced by one result that is no output itself, and by no input.
            same = same if same in made and same not in returned else None
            returned.update({same} if same else ())
        if same is not None:
            alias[node.name] = same
        else:
            made[node.name] = node
    outputs = [rename(output, alias) for output in subgraph.outputs]
    nodes = [_reshaping(_linear(node, made, metas)) for node in made.values()]
    # Transposes and aliases may have lost their uses.
    kept = {node.name for node in nodes if node.op not in _IDENTITIES | _INVOLUTIONS}
    return Subgraph(subgraph.inputs, ancestors(nodes, outputs, set(), kept)[0], outputs)


def _equal_value(node: Node, made: Mapping[str, Node]) -> str | None:
    """Return the earlier value with the result and memory of `node`; None: there is none."""
    source = node.args[0] if node.args else None
    if not isinstance(source, str) or node.kwargs:
        return None
    if node.op in _IDENTITIES:
        return source
    before = made.get(source)
    if node.op in _INVOLUTIONS and before is not None and (before.op, before.kwargs) == (node.op, {}):
        first = before.args[0]
        return first if isinstance(first, str) and before.args[1:] == node.args[1:] else None
    return None


def _linear(node: Node, made: Mapping[str, Node], metas: Mapping[str, ValueMeta]) -> Node:
    """Return a linear layer in place of `node`, where that is an `addmm` by a transposed weight; else `node`."""
    if node.op != "aten::addmm.default" or node.kwargs or len(node.args) != 3:
        return node
    bias, source, matrix = node.args
    transposed = made.get(matrix) if isinstance(matrix, str) else None
    added = metas.get(bias) if isinstance(bias, str) else None
    if transposed is None or transposed.op != "aten::t.default":
        return node
    # Only vectors as long as a row are biases.
    if not (isinstance(added, TensorMeta) and isinstance(node.meta, TensorMeta) and added.shape == node.meta.shape[1:]):
        return node
    return msgspec.structs.replace(node, op="aten::linear.default", args=[source, transposed.args[0], bias])


def _reshaping(node: Node) -> Node:
    """Return a view as a reshape: nothing writes through it, and kernels may choose other strides than traced."""
    is_view = node.op in ("aten::view.default", "aten::_unsafe_view.default")
    return msgspec.structs.replace(node, op="aten::reshape.default") if is_view else node
