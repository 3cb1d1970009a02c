"""Rows that a `select` takes, as classifiers take a sentence's first token, are computed alone.

Values and gradients are those of the whole, but that NaN in a row that nothing reads reaches no gradient.
"""

from __future__ import annotations

from typing import Any

import torch

from aotexport.torch_internals.names import OpOverload

aten = torch.ops.aten
_SELECT, _DROPOUT, _LINEAR, _NORM = aten.select.int, aten.dropout.default, aten.linear.default, aten.layer_norm.default


def compute_read_rows(graph: torch.fx.Graph) -> None:
    """Move selections in a forward graph before operators whose other results nothing reads.

    The operators stay where they are, for regions and writes in place; dropout draws as many numbers as before.
    """
    for node in reversed([*graph.nodes]):
        places = {user.args[1:] if user.target is _SELECT else () for user in node.users}
        place: Any = places.pop() if len(places) == 1 else ()
        if len(place) != 2 or not isinstance(place[1], int):
            continue
        axes = _rows_read(node, place[0] % node.meta["val"].dim())
        rows = {operand: _selected(graph, operand, axis, place[1]) for operand, axis in axes.items()}
        if not rows:
            continue
        with graph.inserting_before(node):
            if node.target is _DROPOUT and all(node.args[1:]):
                (row,) = rows.values()
                size = [
                    at if isinstance(at, int) else graph.call_function(aten.sym_size.int, at) for at in _sizes(node)
                ]
                ones = graph.call_function(aten.new_ones.default, (row, size))
                scales = graph.call_function(_DROPOUT, (ones, *node.args[1:]))
                ones.meta = scales.meta = {"val": node.meta["val"]}
                made = graph.call_function(aten.mul.Tensor, (row, graph.call_function(_SELECT, (scales, *place))))
            else:
                made = graph.node_copy(node, lambda each, rows=rows: rows.get(each, each))
        for user in [*node.users]:
            made.meta = dict(user.meta)
            user.replace_all_uses_with(made)
            graph.erase_node(user)
        graph.erase_node(node)


def _rows_read(node: torch.fx.Node, axis: int) -> dict[torch.fx.Node, int]:
    """Return the operands of which a row along `axis` reads one row, by their axis; none: it may read more."""
    args: Any = node.args
    target, value, found = node.target, node.meta["val"], dict[torch.fx.Node, int]()
    if target is _DROPOUT:
        read = args[:1] if value.device.type == "cpu" and value.is_contiguous() and None not in _sizes(node) else ()
    elif target in (_LINEAR, _NORM):
        within = len(args[1]) if target is _NORM else 1
        read = args[:1] if axis < value.dim() - within and args[0] not in args[1:] else ()
    else:
        tags = target.tags if isinstance(target, OpOverload) and not target._schema.is_mutable else ()
        is_row_wise = torch.Tag.pointwise in tags and torch.Tag.nondeterministic_seeded not in tags
        read = node.all_input_nodes if is_row_wise else ()
    for operand in read:
        given: Any = operand.meta.get("val")
        own = axis - value.dim() + given.dim() if isinstance(given, torch.Tensor) else -1
        if own < 0:
            continue
        # A row without an axis would promote dtypes as a number does.
        is_row = operand.op == "call_function" and given.dim() > 1 and own <= axis
        if not is_row or str(given.shape[own]) != str(value.shape[axis]):
            return {}
        found[operand] = own
    return found


def _sizes(node: torch.fx.Node) -> list[Any]:
    """Return the sizes of a value; those that change as an input and its axis, None: no input has one."""
    inputs = [each for each in node.graph.find_nodes(op="placeholder") if isinstance(each.meta["val"], torch.Tensor)]
    read = {str(size): (each, axis) for each in inputs for axis, size in enumerate(each.meta["val"].shape)}
    return [size if isinstance(size, int) else read.get(str(size)) for size in node.meta["val"].shape]


def _selected(graph: torch.fx.Graph, operand: torch.fx.Node, axis: int, index: int) -> torch.fx.Node:
    """Return the one selection of an operand, right after it."""
    for user in operand.users:
        if user.target is _SELECT and user.args[1:] == (axis, index):
            return user
    with graph.inserting_after(operand):
        found = graph.call_function(_SELECT, (operand, axis, index))
    found.meta = {**operand.meta, "val": operand.meta["val"].select(axis, index)}
    return found
