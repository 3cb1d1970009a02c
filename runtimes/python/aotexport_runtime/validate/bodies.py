"""Types across the border of a body: what an operator with bodies passes to them, and what it returns of theirs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from aotexport_runtime.errors import Place
from aotexport_runtime.schema.graph import Graph, Node
from aotexport_runtime.schema.values import (
    Argument,
    FloatArgument,
    ScalarMeta,
    SequenceMeta,
    SizeArgument,
    SizeMeta,
    SubgraphArgument,
    TensorMeta,
    ValueMeta,
)

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

_CONDITIONS = ("higher_order::while_loop", "higher_order::while_loop_stack_output")


def check_bodies(
    node: Node, subgraphs: Mapping[str, Graph], values: Mapping[str, ValueMeta], where: Place, *, typed: bool
) -> None:
    """Refuse bodies that take other values than they get, or results that are not what bodies return.

    Args:
        node: a call whose operands were checked; others than those of operators with bodies pass.
        subgraphs: the bodies of its graph.
        values: metadata of its operands.
        where: of the node, for errors.
        typed: whether dtypes of operands are those that the graph says: no autocast changes them.
    """
    if node.op == "higher_order::register_hook":
        _check_taken(node, node.args[0], 1 + _count(node.args[2]), subgraphs, where)
    if node.op not in _BODIES:
        return
    positions, lists = _BODIES[node.op]
    for position in positions:
        _check_taken(node, node.args[position], sum(_count(node.args[i]) for i in lists), subgraphs, where)
        _check_operands(node, _body(node.args[position], subgraphs), lists, values, where, typed=typed)
    if node.op == "higher_order::cond":
        _check_truth(node, node.args[0], values, where)
    if node.op in _CONDITIONS:
        condition = _body(node.args[0], subgraphs)
        metas = {value.name: value.meta for value in (*condition.inputs, *condition.nodes)}
        _check_truth(node, condition.outputs[0] if len(condition.outputs) == 1 else None, metas, where)
    if not isinstance(node.meta, SequenceMeta):
        raise where.at("meta").invalid(
            f"`{node.op}` gives a sequence, and the graph says otherwise", "result-type/body-sequence"
        )
    for position in positions[1:] if node.op in _CONDITIONS else positions:
        _check_results(node, node.meta.items, _body(node.args[position], subgraphs), where.at("meta"))


def _body(argument: Argument, subgraphs: Mapping[str, Graph]) -> Graph:
    assert isinstance(argument, SubgraphArgument)
    return subgraphs[argument.name]


def _items(argument: Argument) -> Sequence[Argument]:
    assert isinstance(argument, list)
    return argument


def _count(argument: Argument) -> int:
    return len(_items(argument))


def _check_taken(node: Node, body: Argument, count: int, subgraphs: Mapping[str, Graph], where: Place) -> None:
    taken = len(_body(body, subgraphs).inputs)
    if taken != count:
        raise where.invalid(
            f"a body of `{node.op}` takes {taken} values, and gets {count}", "operator-arguments/body-count"
        )


def _check_operands(
    node: Node, body: Graph, lists: Sequence[int], values: Mapping[str, ValueMeta], where: Place, *, typed: bool
) -> None:
    operands = [(operand, int(_OVER_ROWS.get(node.op) == i)) for i in lists for operand in _items(node.args[i])]
    for (operand, fewer_axes), taken in zip(operands, body.inputs, strict=True):
        given = described_argument(operand, values, -fewer_axes, typed=typed)
        expected = described(taken.meta, typed=typed)
        # Nothing stands for an operand that the body does not use.
        if given not in (None, "nothing", expected) and expected != "nothing":
            raise where.invalid(
                f"a body of `{node.op}` takes {expected}, and gets {given}", "operator-arguments/body-operand"
            )


def _check_truth(node: Node, argument: Argument, values: Mapping[str, ValueMeta], where: Place) -> None:
    """Refuse what has no truth value."""
    meta = values.get(argument) if isinstance(argument, str) else None
    is_number = isinstance(argument, int | SizeArgument) or isinstance(meta, SizeMeta | ScalarMeta)
    if isinstance(meta, TensorMeta) and all(size == 1 for size in meta.shape if isinstance(size, int)):
        return
    if not is_number:
        raise where.invalid(
            f"`{node.op}` decides by what is no truth value, and no tensor of one element",
            "operator-arguments/predicate",
        )


def _check_results(node: Node, items: Sequence[ValueMeta], body: Graph, where: Place) -> None:
    metas = {value.name: value.meta for value in (*body.inputs, *body.nodes)}
    outputs = body.outputs
    if node.op == "higher_order::autograd_function":
        assert isinstance(node.args[4], int)
        outputs = outputs[: node.args[4]]
    stacked = _stacked(node, len(outputs))
    # Metadata within a region of autocast tell of none.
    typed = not any(each.op == "torch::enter_autocast" for each in body.nodes)
    if len(items) != len(outputs) or any(
        described_argument(output, metas, axes, typed=typed) not in (None, described(item, typed=typed))
        for item, output, axes in zip(items, outputs, stacked, strict=True)
    ):
        raise where.invalid(
            f"`{node.op}` gives what its body returns, and the graph says otherwise", "result-type/body"
        )


def _stacked(node: Node, count: int) -> list[int]:
    """Return per result how many axes it has more than what the body returns in a step."""
    if node.op == "higher_order::scan":
        carried = _count(node.args[1])
        return [0] * carried + [1] * (count - carried)
    return [int(node.op in ("higher_order::while_loop_stack_output", "higher_order::map_impl"))] * count


def described(meta: ValueMeta | None, more_axes: int = 0, *, typed: bool = True) -> str:
    """Return what a value is said to be, in words, as far as types go: without sizes.

    Args:
        meta: its metadata; None: it has none.
        more_axes: to add to those of a tensor.
        typed: whether to tell the dtype of a tensor.
    """
    if isinstance(meta, TensorMeta):
        return f"a tensor{f' of {meta.dtype}' if typed else ''} with {len(meta.shape) + more_axes} axes"
    if isinstance(meta, SizeMeta | ScalarMeta):
        return "a float" if isinstance(meta, ScalarMeta) and meta.type == "float" else "an integer"
    return "a sequence" if isinstance(meta, SequenceMeta) else "nothing"


def described_argument(
    argument: Argument, metas: Mapping[str, ValueMeta], more_axes: int = 0, *, typed: bool = True
) -> str | None:
    """Return what an argument, or output of a graph, is, as `described` does; None: the graph has no value of its name.

    Args:
        argument: a reference or a constant.
        metas: metadata of the graph's values.
        more_axes: see `described`.
        typed: see `described`.
    """
    if isinstance(argument, str):
        return described(metas[argument], more_axes, typed=typed) if argument in metas else None
    if isinstance(argument, int | SizeArgument):
        return "an integer"
    if isinstance(argument, float | FloatArgument):
        return "a float"
    return "nothing" if argument is None else "a constant"
