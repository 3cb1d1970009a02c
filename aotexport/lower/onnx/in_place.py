"""New state of training steps in the memory of the old: what reads old state runs before anything writes there.

Runtimes run nodes in any order that data allow, so rates, of which new parameters are computed, wait for what else is
computed of old ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import onnx_ir as ir

_VIEWS = frozenset(("Flatten", "Identity", "Reshape", "Squeeze", "Transpose", "Unsqueeze"))
"""Operators that runtimes leave out, or make part of those that take their result."""

_WRITERS = frozenset(("Add", "Div", "Mul", "Sub"))
"""Operators that may write over an operand: ONNX Runtime's own plans of memory let them."""


def written_over(model: ir.Model, new: Mapping[str, ir.Value], names: Mapping[str, str]) -> list[str]:
    """Return the names of those of `new` that may lie in the memory of the old state; they get to wait where they must.

    `new` has the output of each path or state tensor that changes, `names` the input of each.
    """
    given = {value.name: value for value in model.graph.inputs}
    rates = [given[name] for path, name in names.items() if path.startswith("optimizer['lr']") and name in given]
    # What bodies of branches and loops read is not followed.
    rates = rates if all(node.graph is model.graph for node in model.graph.all_nodes()) else []
    below = {node for rate in rates for user, _ in rate.uses() for node in _reached(user, down=True)}
    found, late = list[str](), dict[ir.Node, None]()
    for path, value in new.items():
        last, old = value.producer(), given.get(names.get(path))
        if last is None or old is None or last.op_type not in _WRITERS:
            continue
        above = _reached(last, down=False)
        others = [node for node in _readers(old) if node not in above]
        if not others or (last in below and below.isdisjoint(others)):
            found.append(str(value.name))
            late |= dict.fromkeys(others)
    if late:
        _wait(model.graph, rates, [node.outputs[0] for node in late])
    return found


def _readers(value: ir.Value) -> Iterator[ir.Node]:
    for node, _ in value.uses():
        yield node
        if node.op_type in _VIEWS and value is node.inputs[0]:
            yield from _readers(node.outputs[0])


def _reached(first: ir.Node, *, down: bool) -> set[ir.Node]:
    """Return a node and those that its results lead to, or else that lead to it."""
    found, pending = set[ir.Node](), [first]
    while pending:
        node = pending.pop()
        if node not in found:
            found.add(node)
            pending += [user for value in node.outputs for user, _ in value.uses()] if down else node.predecessors()
    return found


def _wait(graph: ir.Graph, rates: Sequence[ir.Value], values: Sequence[ir.Value]) -> None:
    """Add the sum of no elements of `values` to `rates`."""
    nodes, bounds = list[ir.Node](), list[ir.Value]()

    def made(op: str, *inputs: ir.Value, **attributes: int) -> ir.Value:
        nodes.append(ir.node(op, inputs, attributes, num_outputs=1))
        return nodes[-1].outputs[0]

    for name, number in (("late.begin", 0), ("late.axis", 1)):
        bounds.append(ir.Value(name=name, const_value=ir.tensor(np.array([number]), name=name)))
        graph.register_initializer(bounds[-1])
    none = [made("Slice", made("Flatten", value, axis=0), bounds[0], *bounds) for value in values]
    zero = made("ReduceSum", made("Concat", *(made("Cast", each, to=1) for each in none), axis=1), keepdims=0)
    for rate in rates:
        assert rate.dtype is not None
        users = rate.uses()
        waited = made("Add", rate, made("Cast", zero, to=int(rate.dtype)))
        for node, index in users:
            node.replace_input_with(index, waited)
    graph.extend(nodes)
    graph.sort()
