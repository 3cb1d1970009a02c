"""Types across the border of a body: what an operator with bodies passes to them, and what it returns of theirs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from aotexport_runtime.errors import Place
from aotexport_runtime.schema.graph import Graph, Node
from aotexport_runtime.schema.values import (
    Argument,
    ScalarMeta,
    SequenceMeta,
    SizeArgument,
    SizeMeta,
    SubgraphArgument,
    TensorMeta,
    ValueMeta,
)
from aotexport_runtime.validate.arguments import Values, described, described_argument, metas_of

_BODIES: dict[str, tuple[Sequence[int], Sequence[int]]] = {
    "higher_order::cond": ((1, 2), (3,)),
    "higher_order::while_loop": ((0, 1), (2, 3)),
    "higher_order::while_loop_stack_output": ((0, 1), (2, 3)),
    "higher_order::scan": ((0,), (1, 2, 3)),
    "higher_order::map_impl": ((0,), (1, 2)),
    "higher_order::invoke_subgraph": ((0,), (1,)),
    "higher_order::autograd_function": ((0,), (2, 3)),
}
"""Per operator the positions of bodies that all take the same, and of the lists that they take."""

_OVER_ROWS = {"higher_order::scan": 2, "higher_order::map_impl": 1}
"""Position of the list of tensors that bodies take row by row."""


def check_bodies(node: Node, subgraphs: Mapping[str, Graph], values: Values, where: Place, *, typed: bool) -> None:
    """Refuse bodies that take other values than they get, or results that are not what bodies return.

    Args:
        node: a call whose operands were checked; others than those of operators with bodies pass.
        subgraphs: the bodies of its graph.
        values: metadata of its operands.
        where: of the node, for errors.
        typed: whether dtypes of operands are those that the graph says: no autocast changes them.
    """
    if node.op == "higher_order::register_hook":
        _check_taken(node, _body(node.args[0], subgraphs), 1 + len(_items(node.args[2])), where)
    if node.op not in _BODIES:
        return
    positions, lists = _BODIES[node.op]
    bodies = [_body(node.args[position], subgraphs) for position in positions]
    operands = [
        described_argument(operand, values, -(_OVER_ROWS.get(node.op) == index), typed=typed)
        for index in lists
        for operand in _items(node.args[index])
    ]
    for body in bodies:
        _check_taken(node, body, len(operands), where)
        for given, taken in zip(operands, body.inputs, strict=True):
            expected = described(taken.meta, typed=typed)
            # Nothing stands for an operand that the body does not use.
            if given not in (None, "nothing", expected) and expected != "nothing":
                message = f"a body of `{node.op}` takes {expected}, and gets {given}"
                raise where.invalid(message, "operator-arguments/body-operand")
    if node.op == "higher_order::cond":
        _check_truth(node, node.args[0], values, where)
    if node.op.startswith("higher_order::while_loop"):
        condition, *bodies = bodies
        decision = condition.outputs[0] if len(condition.outputs) == 1 else None
        _check_truth(node, decision, metas_of(condition), where)
    if not isinstance(node.meta, SequenceMeta):
        message = f"`{node.op}` gives a sequence, and the graph says otherwise"
        raise where.at("meta").invalid(message, "result-type/body-sequence")
    for body in bodies:
        _check_results(node, node.meta.items, body, where.at("meta"))


def _body(argument: Argument, subgraphs: Mapping[str, Graph]) -> Graph:
    assert isinstance(argument, SubgraphArgument)
    return subgraphs[argument.name]


def _items(argument: Argument) -> Sequence[Argument]:
    assert isinstance(argument, list)
    return argument


def _check_taken(node: Node, body: Graph, count: int, where: Place) -> None:
    if len(body.inputs) != count:
        message = f"a body of `{node.op}` takes {len(body.inputs)} values, and gets {count}"
        raise where.invalid(message, "operator-arguments/body-count")


def _check_truth(node: Node, argument: Argument, values: Values, where: Place) -> None:
    """Refuse what has no truth value."""
    meta = values.get(argument) if isinstance(argument, str) else None
    is_number = isinstance(argument, int | SizeArgument) or isinstance(meta, SizeMeta | ScalarMeta)
    is_one = isinstance(meta, TensorMeta) and all(size == 1 for size in meta.shape if isinstance(size, int))
    if not is_number and not is_one:
        message = f"`{node.op}` decides by what is no truth value, and no tensor of one element"
        raise where.invalid(message, "operator-arguments/predicate")


def _check_results(node: Node, items: Sequence[ValueMeta], body: Graph, where: Place) -> None:
    outputs, values = body.outputs, metas_of(body)
    if node.op == "higher_order::autograd_function":
        assert isinstance(node.args[4], int)
        outputs = outputs[: node.args[4]]
    # Metadata within a region of autocast tell of none.
    typed = not any(each.op == "torch::enter_autocast" for each in body.nodes)
    # What the body returns in a step is stacked, but for what `scan` carries on.
    whole = len(_items(node.args[1])) if node.op == "higher_order::scan" else 0
    is_stacked = node.op in ("higher_order::scan", "higher_order::while_loop_stack_output", "higher_order::map_impl")
    found = [
        described_argument(output, values, int(is_stacked and index >= whole), typed=typed)
        for index, output in enumerate(outputs)
    ]
    said = [described(item, typed=typed) for item in items]
    if len(said) != len(found) or any(each not in (None, other) for each, other in zip(found, said, strict=True)):
        message = f"`{node.op}` gives what its body returns, and the graph says otherwise"
        raise where.invalid(message, "result-type/body")
