"""Passes that make inputs of tensors which the code closes over, complete the graph, and erase what it does not use."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from aotexport.capture.effects.distributed import FromLocal
from aotexport.capture.effects.grad_mode import make_relative
from aotexport.capture.passes.draft import Draft
from aotexport.capture.trace.forward_capture import Binding
from aotexport.errors import ExportFailed
from aotexport.model.state import State
from aotexport.torch_internals.calls import FakeTensor
from aotexport.torch_internals.checks import insert_data_dependent_checks
from aotexport.torch_internals.names import HigherOrderOperator, OpOverload
from aotexport.torch_internals.subclasses import is_wrap
from aotexport_runtime.values import meshes
from aotexport_runtime.values.subclasses import inner_tensor


def lift_subgraph_constants(draft: Draft) -> Draft:
    """Turn tensors that subgraphs close over into operands of their operators; the main graph closes over them then.

    The operators are those whose last argument holds the operands that their subgraphs take last: `cond`, `while_loop`,
    `scan`, `map` (torch 2.13, `torch/_higher_order_ops/`).
    """
    _lift(draft.graph)
    return draft


def _lift(graph: torch.fx.GraphModule) -> None:
    for node in list(graph.graph.nodes):
        run = list(subgraphs_of(graph, node)) if is_operator(node) else []
        if run:
            # The bodies of a `while_loop` themselves show what they write to.
            node.kwargs = {name: value for name, value in node.kwargs.items() if name != "mutated_arg_indices"}
        if not run or not isinstance(node.args[-1], list | tuple):
            continue
        operands = list(node.args[-1])
        for subgraph in run:
            _lift(subgraph)
        for owner, constant in [(subgraph, constant) for subgraph in run for constant in _constants(subgraph)]:
            operands.append(_attribute(graph, node, constant, getattr(owner, str(constant.target))))
            name, value = f"constant_{len(operands)}", constant.meta["val"]
            placeholders = {other: _new_placeholder(other, name, value) for other in run}
            constant.replace_all_uses_with(placeholders[owner])
            owner.graph.erase_node(constant)
        node.update_arg(len(node.args) - 1, tuple(operands))
        for subgraph in run:
            subgraph.recompile()


def _constants(subgraph: torch.fx.GraphModule) -> list[torch.fx.Node]:
    attributes = [
        (node, getattr(subgraph, str(node.target), None)) for node in subgraph.graph.find_nodes(op="get_attr")
    ]
    return [node for node, value in attributes if isinstance(value, torch.Tensor) and not isinstance(value, FakeTensor)]


def _attribute(
    graph: torch.fx.GraphModule, user: torch.fx.Node, like: torch.fx.Node, value: torch.Tensor
) -> torch.fx.Node:
    """Return a node before `user` for a tensor that becomes an attribute of `graph`."""
    names = (f"_subgraph_constant{index}" for index in itertools.count())
    name = next(name for name in names if not hasattr(graph, name))
    setattr(graph, name, value)
    with graph.graph.inserting_before(user):
        node = graph.graph.create_node("get_attr", name)
    node.meta = dict(like.meta)
    return node


def lift_constants(draft: Draft) -> Draft:
    """Turn tensors that the graph closes over into placeholders, one per tensor; one for equal ones that it copies."""
    module, state = draft.graph, State(list(draft.state))
    bindings, inputs = list(draft.bindings), list(draft.inputs)
    placeholders = module.graph.find_nodes(op="placeholder")
    by_entry = {id(b.entry): node for b, node in zip(bindings, placeholders, strict=True) if b.entry}
    for node in module.graph.find_nodes(op="get_attr"):
        tensor = getattr(module, str(node.target), None)
        if not isinstance(tensor, torch.Tensor):
            continue
        if isinstance(tensor, FakeTensor):
            raise ExportFailed("the model's own backward pass uses a tensor whose making the trace does not show")
        is_copied = all(user.target is torch.ops.aten.lift_fresh_copy.default for user in node.users)
        entry = state.add_constant(tensor, is_copied=is_copied)
        if id(entry) not in by_entry:
            name = f"constant_{len(bindings) - len(placeholders)}"
            by_entry[id(entry)] = _new_placeholder(module, name, node.meta.get("val"))
            bindings.append(Binding(entry=entry))
            inputs.append(draft.fakes.fake(tensor))
        node.replace_all_uses_with(by_entry[id(entry)])
        module.graph.erase_node(node)
    return replace(draft, bindings=tuple(bindings), inputs=tuple(inputs), state=tuple(state.entries))


def _new_placeholder(graph: torch.fx.GraphModule, name: str, value: Any) -> torch.fx.Node:
    """Return a new placeholder of value `value` after the existing ones."""
    last = next(reversed(graph.graph.find_nodes(op="placeholder")), None)
    with graph.graph.inserting_after(last) if last is not None else graph.graph.inserting_before():
        placeholder = graph.graph.placeholder(name)
    placeholder.meta["val"] = value
    return placeholder


def make_grad_modes_relative(draft: Draft) -> Draft:
    """Let every marked switch restore the caller's mode, see `grad_mode`."""
    make_relative(draft.graph.graph)
    return draft


def insert_data_checks(draft: Draft) -> Draft:
    """Insert checks of the trace's assumptions about data-dependent numbers into the graph."""
    environment = draft.fakes.mode.shape_env
    assert environment is not None
    insert_data_dependent_checks(draft.graph, environment)
    return draft


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


def fix_gradients_of_loops(draft: Draft) -> Draft:
    """Fix the facts beside values that gradients through a `while_loop` depend on in torch; see `Program.fixed`.

    Values that begin without requiring grad carry none from step to step (`WhileLoopAutogradOp`). The backward of a
    loop that draws random numbers draws them for contiguous values.
    """
    loops = [n for n in differentiable_operators(draft.graph, draft.inputs) if operator_name(n) == "while_loop"]
    reads: Any = draft.reads
    if loops:
        reads |= {"requires_grad"}
    if any(draws(subgraph) for loop in loops for subgraph in subgraphs_of(draft.graph, loop)):
        reads |= {"layout"}
    return replace(draft, reads=reads)


def is_operator(node: torch.fx.Node) -> bool:
    """Return whether a node calls an operator that takes functions."""
    return isinstance(node.target, HigherOrderOperator)


def subgraphs_of(graph: torch.fx.GraphModule, node: torch.fx.Node) -> Iterator[torch.fx.GraphModule]:
    """Yield the subgraphs that a node of `graph` runs."""
    for operand in node.all_input_nodes:
        subgraph = getattr(graph, str(operand.target), None) if operand.op == "get_attr" else None
        if isinstance(subgraph, torch.fx.GraphModule):
            yield subgraph


def operator_name(node: torch.fx.Node) -> str:
    """Return the user's name of the higher-order operator that a node calls."""
    return node.target.name().removesuffix("_impl")  # type: ignore[union-attr]


def draws(subgraph: torch.fx.GraphModule) -> bool:
    """Return whether a graph, or one of its subgraphs, draws random numbers."""
    return any(
        (isinstance(node.target, OpOverload) and torch.Tag.nondeterministic_seeded in node.target.tags)
        or any(map(draws, subgraphs_of(subgraph, node)))
        for node in subgraph.graph.nodes
    )


def differentiable_operators(graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> list[torch.fx.Node]:
    """Return the operators with functions that are computed from `inputs` that require grad, other than by `detach`."""
    placeholders = zip(graph.graph.find_nodes(op="placeholder"), inputs, strict=True)
    found = {node for node, value in placeholders if isinstance(value, torch.Tensor) and value.requires_grad}
    for node in graph.graph.nodes:
        if node.target is not torch.ops.aten.detach.default and not found.isdisjoint(node.all_input_nodes):
            found.add(node)
    return [node for node in graph.graph.nodes if node in found and is_operator(node)]
