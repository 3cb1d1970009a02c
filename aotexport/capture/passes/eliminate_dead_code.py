"""Erase nodes that nothing uses and that have no effect."""

from __future__ import annotations

import operator

import torch

from aotexport.capture.effects.distributed import FromLocal
from aotexport.capture.passes.contract import Fact, graph_pass
from aotexport.capture.passes.draft import Draft
from aotexport.torch_internals.names import OpOverload
from aotexport.torch_internals.subclasses import is_wrap
from aotexport_runtime.values import meshes
from aotexport_runtime.values.subclasses import inner_tensor


@graph_pass(requires=[Fact.NUMBERS_CHECKED], guarantees=[Fact.CODE_USED])
def eliminate_dead_code(draft: Draft) -> Draft:
    """Erase nodes without users and effects; data checks must be in the graph already, to use their numbers."""
    draft.graph.graph.eliminate_dead_code(is_impure_node=_has_effect)
    return draft


def _has_effect(node: torch.fx.Node) -> bool:
    """Return whether a node must stay although nothing uses its result."""
    if node.op in ("placeholder", "output"):
        return True
    if node.op != "call_function":
        return False
    if not isinstance(node.target, OpOverload):
        pure = (operator.getitem, inner_tensor, meshes.to_local, meshes.redistribute)
        return node.target not in pure and not is_wrap(node.target) and not isinstance(node.target, FromLocal)
    schema = node.target._schema
    pure = not schema.is_mutable and torch.Tag.nondeterministic_seeded not in node.target.tags
    composite_random = ("dropout", "batch_norm", "rrelu", "rnn", "lstm", "gru", "instance_norm", "assert")
    return not pure or any(word in schema.name for word in composite_random)
