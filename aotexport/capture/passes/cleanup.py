"""Passes that complete the graph and erase what it does not use."""

from __future__ import annotations

import operator
from dataclasses import replace

import torch

from aotexport.capture.effects.distributed import FromLocal
from aotexport.capture.effects.grad_mode import make_relative
from aotexport.capture.passes.contract import Draft, Fact, graph_pass
from aotexport.torch_internals.checks import insert_data_dependent_checks
from aotexport.torch_internals.names import OpOverload
from aotexport.torch_internals.subclasses import is_wrap
from aotexport_runtime.values import meshes
from aotexport_runtime.values.subclasses import inner_tensor


@graph_pass(guarantees=[Fact.GRAD_MODES_RELATIVE])
def make_grad_modes_relative(draft: Draft) -> Draft:
    """Let every marked switch restore the caller's mode, see `grad_mode`."""
    make_relative(draft.graph.graph)
    return draft


@graph_pass(guarantees=[Fact.NUMBERS_CHECKED])
def insert_data_checks(draft: Draft) -> Draft:
    """Insert checks of the trace's assumptions about data-dependent numbers into the graph."""
    environment = draft.fakes.mode.shape_env
    assert environment is not None
    insert_data_dependent_checks(draft.graph, environment)
    return draft


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


@graph_pass(requires=[Fact.TENSORS_ARE_INPUTS, Fact.CODE_USED], guarantees=[Fact.STATE_USED])
def drop_unused_state(draft: Draft) -> Draft:
    """Erase placeholders without users, except arguments, and state of which the code asks whether it requires grad."""
    used: list[int] = []
    for index, node in enumerate(draft.graph.graph.find_nodes(op="placeholder")):
        binding = draft.bindings[index]
        if binding.argument is None and not binding.answers and not node.users:
            draft.graph.graph.erase_node(node)
        else:
            used.append(index)
    return replace(
        draft,
        bindings=tuple(draft.bindings[index] for index in used),
        inputs=tuple(draft.inputs[index] for index in used),
    )
