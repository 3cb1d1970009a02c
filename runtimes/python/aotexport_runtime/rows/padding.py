"""Whether zeros behind the end of a call's inputs change its results: read off a program's forward graph. No torch.

By induction over the nodes: at steps of the call, a value has the entries that it has without padding. At padded steps,
its number is followed as far as it is the same for every call; one that is not known is taken to be finite.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from aotexport_runtime.rows.analysis import Reading, State, may_share, written
from aotexport_runtime.rows.padded import Number, Padded, PaddedCall, Place, throughout
from aotexport_runtime.rows.padding_rules import RULES, RULES_BY_NAME, UNKNOWN
from aotexport_runtime.rows.rules import Call, Dependent, Rows
from aotexport_runtime.schema.graph import Graph, Node
from aotexport_runtime.schema.values import SequenceMeta, TensorMeta, ValueMeta
from aotexport_runtime.values.sizes import symbols_of


def dependence_on_padding(
    graph: Graph, symbol: str, inputs: Mapping[int, int], outputs: Mapping[int, int | None]
) -> str | None:
    """Return why results of a call may depend on the zeros behind its end; None: none does.

    Args:
        graph: the forward graph of a program.
        symbol: the length, by its symbol.
        inputs: per index of an input with the length, its axis.
        outputs: per index of a result, the axis that is cut; None: none is.
    """
    states = [Padded((Place(Rows(inputs[i]), 0.0),)) if i in inputs else Padded() for i in range(len(graph.inputs))]
    try:
        results = _PaddingReading(graph, symbol, states, Padded()).results()
    except Dependent as reason:
        return str(reason)
    for index, axis in outputs.items():
        result = results[index]
        assert isinstance(result, Padded)
        expected = [] if axis is None else [Rows(axis)]
        if [replace(rows, numbered=False) for rows, _ in result.places] != expected:
            return f"result {index} does not have the steps of its call, in their order"
    return None


class _PaddingReading(Reading[Padded]):
    """Where the values of a graph have the length, and what padded steps of it are."""

    size = "length"

    def _computed(self, node: Node, kind: tuple[str, int], call: Call[Padded]) -> State[Padded]:
        name = node.op.removeprefix("aten::").partition(".")[0]
        rule = RULES_BY_NAME.get(name) or RULES.get(kind[0])
        is_padded = call.counts or any(each.rows.places for each in call.operands)
        if is_padded and rule is None:
            raise Dependent(UNKNOWN)
        if kind[0] == "recurrent" and any(self._takes_state(each, node.name) for each in self._graph.nodes):
            raise Dependent("returns its state behind the last step")

        def known(meta: ValueMeta) -> Padded:
            shape = self._shape(meta) if isinstance(meta, TensorMeta) else ()
            one = PaddedCall(name, *kind, call.arguments, call.operands, shape, self._count)
            places = rule(one) if rule and is_padded and isinstance(meta, TensorMeta) else ()
            return self._checked(meta, shape, places, throughout(one))

        found = tuple(map(known, node.meta.items)) if isinstance(node.meta, SequenceMeta) else known(node.meta)
        if not written(node.op):
            return found
        if written(node.op) != {next(iter(call.arguments))} or not isinstance(node.args[0], str):
            raise Dependent(UNKNOWN)
        return self._forgotten(node.args[0])

    def _forgotten(self, target: str) -> State[Padded]:
        """Forget the numbers of a value that is written to, and of its views; return what is left."""
        roots = {value.name: "" for value in self._graph.inputs}
        for each in self._graph.nodes:
            source = each.args[0] if each.args else None
            roots[each.name] = roots[source] if isinstance(source, str) and may_share(each.op) else each.name
        if not roots[target] and self._states[target] != Padded():
            raise Dependent("writes to an input")
        for name, state in self._states.items():
            if roots[name] == roots[target]:
                self._states[name] = _without_numbers(state)
        return self._states[target]

    def _takes_state(self, node: Node, recurrent: str) -> bool:
        return node.op == "python::getitem" and node.args[0] == recurrent and node.args[1] != 0

    def _checked(self, meta: ValueMeta, shape: tuple[int, ...], places: Iterable[Place], value: Number) -> Padded:
        """Return what is known of a result, if it has the length on just those axes whose sizes depend on it."""
        sizes = meta.shape if isinstance(meta, TensorMeta) else ()
        found = {place.rows.axis: place for place in places}
        dependent = {axis: shape[axis] for axis, size in enumerate(sizes) if self._symbol in symbols_of(size)}
        if dependent != {axis: rows.before * self._count * rows.after for axis, (rows, _) in found.items()}:
            raise Dependent("has a result of another length than its operands")
        dtype = meta.dtype if isinstance(meta, TensorMeta) else ""
        ordered = [found[axis] for axis in sorted(found)]
        return Padded(tuple(Place(rows, _as(fill, dtype)) for rows, fill in ordered), _as(value, dtype))


def _as(number: Number, dtype: str) -> Number:
    """Return a number as a dtype has it; None: not every integer type has it."""
    if number is None or dtype == "bool":
        return None if number is None else float(number != 0)
    return number if "float" in dtype or number in range(128) else None


def _without_numbers(state: State[Padded]) -> State[Padded]:
    if isinstance(state, tuple):
        return tuple(map(_without_numbers, state))
    return Padded(tuple(Place(replace(rows, numbered=False)) for rows, _ in state.places))
