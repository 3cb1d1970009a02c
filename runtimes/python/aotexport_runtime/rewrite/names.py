"""Graphs as data: values that nodes use, nodes with other operands, nodes that run even when nothing uses them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import msgspec

from aotexport_runtime.schema.graph import Graph, Node
from aotexport_runtime.schema.values import Argument, NothingMeta, SubgraphArgument, ValueMeta
from aotexport_runtime.validate.arguments import references

ENTER_CHECKPOINT, EXIT_CHECKPOINT = "torch::enter_checkpoint", "torch::exit_checkpoint"
CHECK = "aten::_assert_scalar.default"
"""The operator that checks a condition on values."""

BY_STRIDES = ("aten::as_strided", "aten::view.dtype", "aten::view_as")
"""Operators whose results depend on the layout of their operand."""

FLOATS = "computed::floats"
"""Operator of the node that makes floats of a layer's integers; see `execution.checkpoint.floats`."""

LAYER = "packed::layer"
"""Operator of the node that stands for a packed layer; its arguments are the layer's inputs."""


def operands(node: Node) -> list[str]:
    """Return the names of the values that a node takes, with repetitions."""
    return names_in((*node.args, *node.kwargs.values()))


def names_in(arguments: Iterable[Argument]) -> list[str]:
    """Return the names of the values that arguments refer to, with repetitions."""
    return [name for argument in arguments for name in references(argument)]


def last_uses(
    nodes: Sequence[Node], outputs: Iterable[Argument], shown: Mapping[str, Sequence[str]] = MappingProxyType({})
) -> dict[str, int]:
    """Return per value the index of the node that uses it last; the number of nodes for returned ones.

    `shown`: further values that nodes use, by name of the node.
    """
    uses = {name: i for i, node in enumerate(nodes) for name in (*shown.get(node.name, ()), *operands(node))}
    return uses | dict.fromkeys(names_in(outputs), len(nodes))


def renamed(node: Node, names: Mapping[str, Argument]) -> Node:
    """Return a node with other names, or constants, for its operands."""
    kwargs = {keyword: rename(argument, names) for keyword, argument in node.kwargs.items()}
    return msgspec.structs.replace(node, args=[rename(argument, names) for argument in node.args], kwargs=kwargs)


def rename(argument: Any, names: Mapping[str, Argument]) -> Any:
    """Return an argument with other names, or constants, for the values that it refers to."""
    if isinstance(argument, str):
        return names.get(argument, argument)
    return [rename(item, names) for item in argument] if isinstance(argument, list) else argument


def computed_weights(nodes: Sequence[Node], state: Mapping[str, ValueMeta]) -> dict[str, list[str]]:
    """Return by linear layer's node the nodes that compute its weight of bytes and other `state`, for it alone."""
    made: dict[str, dict[str, None]] = {name: {} for name in state}
    users: dict[str, set[str]] = {}
    found: dict[str, list[str]] = {}
    of_bytes = {name for name, meta in state.items() if getattr(meta, "dtype", None) == "int8"}
    for node in nodes:
        taken = operands(node)
        for name in taken:
            users.setdefault(name, set()).add(node.name)
        weight = node.args[1] if node.op == "aten::linear.default" else None
        if isinstance(weight, str) and weight in of_bytes - state.keys():
            found[node.name] = [*made[weight]]
        elif taken and made.keys() >= set(taken) and not (writes_in_place(node.op) and taken[0] in state):
            made[node.name] = dict.fromkeys([*(each for name in taken for each in made[name]), node.name])
            if not of_bytes.isdisjoint(taken):
                of_bytes.add(node.name)
    return {layer: chain for layer, chain in found.items() if all(users[each] <= {layer, *chain} for each in chain)}


# --- operators that return an operand itself: a trace knows that tensor by the name of their result from then on

_WITH_NOTHING_TO_DO = frozenset(
    (
        *("alpha_dropout", "atleast_1d", "atleast_2d", "atleast_3d", "conj", "conj_physical", "feature_alpha_dropout"),
        *("feature_dropout", "flatten", "lift", "lift_fresh", "positive", "real", "resolve_conj", "resolve_neg"),
        *("sum_to_size", "to", "type_as"),
    )
)
"""Base names of operators that return their first operand where they have nothing to do, as the metadata show."""

_OF_SEVERAL = ("aten::atleast_1d.Sequence", "aten::atleast_2d.Sequence", "aten::broadcast_tensors.default")
"""The same of a list of tensors."""

_OF_THE_FIRST = "aten::native_dropout.default"
"""The same of its operand, as the first of its results."""


def writes_in_place(op: str) -> bool:
    """Return whether an operator changes its first argument, and returns it."""
    base = op.removeprefix("aten::").partition(".")[0]
    # `__and__` computes, and `__iand__` writes.
    return op.startswith("aten::") and base.endswith("_") and (base[:2] != "__" or base.startswith("__i"))


def returned_operand(node: Node, made_by: Callable[[str], Node | None], metas: Mapping[str, ValueMeta]) -> str | None:
    """Return the operand that is the result of a node; None: none is. `made_by` returns the node that makes a value."""
    operand: Any = node.args[0] if node.args else None
    if isinstance(out := node.kwargs.get("out"), str):
        return out
    if writes_in_place(node.op):
        return operand if isinstance(operand, str) else None
    if node.op == "python::getitem" and isinstance(operand, str):
        several, place = made_by(operand), node.args[1]
        items: Any = several.args[0] if several is not None and several.op in (*_OF_SEVERAL, _OF_THE_FIRST) else None
        items = [items] if isinstance(items, str) else items
        operand = items[place] if isinstance(items, list) and isinstance(place, int) and place < len(items) else None
    elif node.op.removeprefix("aten::").partition(".")[0] not in _WITH_NOTHING_TO_DO:
        return None
    return operand if isinstance(operand, str) and metas[operand] == metas[node.name] else None


_SWITCHES = ("dropout_p", "dropout", "train", "training")
"""Arguments of random operators that draw nothing where one of these is zero or False."""


def impure_nodes(graph: Graph) -> set[str]:
    """Return the nodes that run even when nothing uses their result: they draw random numbers, or check for errors."""
    return random_nodes(graph) | {node.name for node in graph.nodes if isinstance(node.meta, NothingMeta)}


def random_nodes(graph: Graph) -> set[str]:
    """Return the nodes that draw random numbers, themselves or in a subgraph that they run."""
    known: dict[str, bool] = {}
    return {node.name for node in graph.nodes if draws(graph, node, known)}


def draws(graph: Graph, node: Node, known: dict[str, bool]) -> bool:
    """Return whether a node of `graph`, or a subgraph that it runs, draws; `known`: by subgraph, filled."""
    if node.op.startswith("aten::"):
        import torch

        base, _, overload = node.op.removeprefix("aten::").partition(".")
        function: Any = getattr(getattr(torch.ops.aten, base, None), overload or "default", None)
        if torch.Tag.nondeterministic_seeded not in getattr(function, "tags", ()):
            return False
        parameters = [each.name for each in function._schema.arguments]
        defaults = {each.name: each.default_value for each in function._schema.arguments}
        given = defaults | dict(zip(parameters, node.args, strict=False)) | node.kwargs
        return not any(given.get(switch, True) in (0, False) for switch in _SWITCHES)
    subgraphs = [argument.name for argument in node.args if isinstance(argument, SubgraphArgument)]
    for name in subgraphs:
        if name not in known:
            known[name] = bool(random_nodes(graph.subgraphs[name]))
    return any(known[name] for name in subgraphs)
