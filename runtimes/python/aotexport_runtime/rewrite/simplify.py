"""Removes calls that change nothing from subgraphs of functional operators; distinct outputs stay distinct. No torch.

Where metadata tell that a reshape changes nothing, a node `assumed::shape` compares the shape when it is computed.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass, field

from msgspec.structs import replace

from aotexport_runtime.rewrite.names import names_in, rename, renamed
from aotexport_runtime.rewrite.partition import Subgraph, ancestors
from aotexport_runtime.schema.graph import Node
from aotexport_runtime.schema.values import NothingMeta, TensorMeta, ValueMeta

_IDENTITIES = frozenset(("aten::detach.default", "aten::alias.default"))
_INVOLUTIONS = frozenset(("aten::t.default", "aten::transpose.int"))
_RESHAPES = frozenset(("aten::view.default", "aten::_unsafe_view.default", "aten::expand.default"))
_ZEROS = "aten::new_zeros.default"

ASSUMED_SHAPE = "assumed::shape"
"""Operator of nodes that raise unless a tensor has these sizes (-1: any)."""


def simplified(subgraph: Subgraph, metas: dict[str, ValueMeta], proven: Set[str], *, writes: bool = False) -> Subgraph:
    """Return `subgraph` without the calls that change nothing; `metas`: of its inputs; for `proven` see `reusing`.

    `writes`: whether nodes write in place; then views stay views, and sums with zeros have memory of their own.
    """
    returned = set(names_in(subgraph.outputs))
    state = _State(dict(metas), set() if writes else proven)
    for node in subgraph.nodes:
        node = renamed(node, state.alias) if state.alias else node
        same = state.equal_value(node)
        if same is not None and node.name in returned:
            # A removed output may be replaced by one result that is no output itself, and by no input.
            same = same if same in state.by_name and same not in returned else None
            returned.update({same} if same else ())
        if same is not None:
            state.alias[node.name] = same
            state.assume(node)
            continue
        state.add(node)
    outputs = [rename(output, state.alias) for output in subgraph.outputs]
    nodes = [state.linear(node) for node in state.nodes]
    # Views and zeros may have lost their uses.
    droppable = {*_IDENTITIES, *_INVOLUTIONS, *_RESHAPES, _ZEROS}
    kept = {node.name for node in nodes if node.op not in droppable}
    needed, _ = ancestors(nodes, outputs, set(), kept)
    # Where nothing writes through a view, kernels may choose other strides than traced.
    views = () if writes else ("aten::view.default", "aten::_unsafe_view.default")
    made = [replace(node, op="aten::reshape.default") if node.op in views else node for node in needed]
    return Subgraph(subgraph.inputs, made, outputs)


@dataclass
class _State:
    metas: dict[str, ValueMeta]
    proven: Set[str]
    alias: dict[str, str] = field(default_factory=dict[str, str])
    nodes: list[Node] = field(default_factory=list[Node])
    by_name: dict[str, Node] = field(default_factory=dict[str, Node])

    def add(self, node: Node) -> None:
        self.nodes.append(node)
        self.by_name[node.name] = node
        self.metas[node.name] = node.meta

    def assume(self, node: Node) -> None:
        """Have the shape compared that makes `node` change nothing, if one does; its name is free then."""
        args = node.args[:2]
        if node.op == "aten::add.Tensor":
            args = [node.args[0], self.by_name[str(node.args[1])].args[1]]
        elif node.op not in _RESHAPES:
            return
        self.nodes.append(Node(name=node.name, op=ASSUMED_SHAPE, args=args, meta=NothingMeta()))

    def equal_value(self, node: Node) -> str | None:
        """Return the earlier value with the result and memory of `node`; None: there is none."""
        source = node.args[0] if node.args else None
        if not isinstance(source, str) or node.kwargs:
            return None
        if node.op in _IDENTITIES:
            return source
        shown = self.metas.get(source)
        if node.op in _RESHAPES and isinstance(shown, TensorMeta) and isinstance(node.meta, TensorMeta):
            layout = node.meta.shape, node.meta.stride, node.meta.dtype
            if (shown.shape, shown.stride, shown.dtype) == layout:
                return source
        if node.op == "aten::add.Tensor" and self._adds_zeros(node):
            return source
        before = self.by_name.get(source)
        if node.op in _INVOLUTIONS and before is not None and before.op == node.op and not before.kwargs:
            first = before.args[0]
            if isinstance(first, str) and before.args[1:] == node.args[1:]:
                return first
        return None

    def _adds_zeros(self, node: Node) -> bool:
        """Return whether a sum of two equals its first term; code that makes gradients defined adds such zeros."""
        added = self.by_name.get(node.args[1]) if len(node.args) == 2 and isinstance(node.args[1], str) else None
        before = self.metas.get(node.args[0]) if isinstance(node.args[0], str) else None
        if added is None or added.op != _ZEROS or node.name not in self.proven or not isinstance(before, TensorMeta):
            return False
        return isinstance(node.meta, TensorMeta) and (before.shape, before.dtype) == (node.meta.shape, node.meta.dtype)

    def linear(self, node: Node) -> Node:
        """Return a linear layer in place of `node`, where that is an `addmm` by a transposed weight; else `node`."""
        if node.op != "aten::addmm.default" or node.kwargs or len(node.args) != 3:
            return node
        bias, source, matrix = node.args
        transposed = self.by_name.get(matrix) if isinstance(matrix, str) else None
        if transposed is None or transposed.op != "aten::t.default":
            return node
        added = self.metas.get(bias) if isinstance(bias, str) else None
        # Only vectors as long as a row are biases.
        if (
            not isinstance(added, TensorMeta)
            or not isinstance(node.meta, TensorMeta)
            or added.shape != node.meta.shape[1:]
        ):
            return node
        return replace(node, op="aten::linear.default", args=[source, transposed.args[0], bias])
