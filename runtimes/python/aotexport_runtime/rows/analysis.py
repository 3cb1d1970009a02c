"""Along which axes calls of a program could be joined, and by which operator a row may know of another."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Generic, TypeAlias

from aotexport_runtime.allowed.operators import aten_signatures
from aotexport_runtime.allowed.signatures import Parameter, signature_of
from aotexport_runtime.rows.rules import RULES, Call, Dependent, Operand, Rows, S, kinds, number_of, reshaped
from aotexport_runtime.schema import values as records
from aotexport_runtime.schema.graph import Graph, Node
from aotexport_runtime.schema.program import ArgumentInput, Program, SizeInput
from aotexport_runtime.schema.sizes import Dimension
from aotexport_runtime.schema.trees import Leaf
from aotexport_runtime.schema.values import Argument, SequenceMeta, SizeMeta, TensorMeta, ValueMeta
from aotexport_runtime.validate.arguments import elements
from aotexport_runtime.values.sizes import symbols_of
from aotexport_runtime.values.trees import leaves


@dataclass(frozen=True, kw_only=True)
class RowAxes:
    """A dynamic size that stands once in every tensor of a call, and is read nowhere else.

    Attributes:
        inputs: axis per `ArgumentInput`, by its index in `Program.inputs`.
        outputs: axis per leaf of the result, by its index in `Program.outputs`.
    """

    dimension: Dimension
    inputs: dict[int, int]
    outputs: dict[int, int]


def row_axes(program: Program) -> list[RowAxes]:
    """Return the sizes along which calls of a program could be joined, the likeliest first."""
    returned = [leaf.index for _, leaf in leaves(program.output_tree) if isinstance(leaf, Leaf)]
    given = {index: spec.meta for index, spec in enumerate(program.inputs) if isinstance(spec, ArgumentInput)}
    made = {index: program.outputs[index] for index in returned}
    if not given or not made or any(isinstance(spec, SizeInput) for spec in program.inputs):
        return []
    found: list[RowAxes] = []
    for dimension in program.dimensions:
        inputs, outputs = (
            {index: axis for index, meta in metas.items() if (axis := _only_axis(meta, dimension.symbol)) is not None}
            for metas in (given, made)
        )
        is_free = (dimension.factor, dimension.offset) == (1, 0) and not any(
            dimension.symbol in symbols_of(guard) for guard in program.guards
        )
        if is_free and (inputs.keys(), outputs.keys()) == (given.keys(), made.keys()):
            found.append(RowAxes(dimension=dimension, inputs=inputs, outputs=outputs))
    return sorted(found, key=lambda axes: ("batch" not in axes.dimension.name.lower(), sum(axes.inputs.values())))


def _only_axis(meta: TensorMeta | None, symbol: str) -> int | None:
    """Return the one axis whose size is `symbol`; None: there is none, or another size depends on it."""
    shape = () if meta is None else meta.shape
    dependent = [axis for axis, size in enumerate(shape) if symbol in symbols_of(size)]
    return dependent[0] if len(dependent) == 1 and shape[dependent[0]] == symbol else None


State: TypeAlias = "S | tuple[State[S], ...]"
"""What is known of a value; a tuple: of each item."""

_KEEPS_NUMBERS = ("moved", "reshaped", "expanded", "sliced")
_COUNTS = {
    "filled": ("size",),
    "expanded": ("size", "repeats", "dims"),
    "reshaped": ("size", "shape", "sizes"),
    "sliced": ("end",),
    "numbered": ("end",),
}
"""Parameters that may depend on the number of rows: what they do to the result is told by its shape."""

_BODIES = {"higher_order::autograd_function": 2, "higher_order::invoke_subgraph": 1}
"""Which argument has the operands of a body that runs once, and is read as a part of its graph."""


def dependence(graph: Graph, axes: RowAxes) -> str | None:
    """Return why a row of a call's results may depend on other rows of it, by the forward graph; None: none does."""
    states = [Rows(axes.inputs[index]) if index in axes.inputs else None for index in range(len(graph.inputs))]
    try:
        results = _RowReading(graph, axes.dimension.symbol, states, None).results()
    except Dependent as reason:
        return str(reason)
    for index, axis in axes.outputs.items():
        if results[index] != Rows(axis):
            return f"result {index} does not have the rows of its call, in their order, on axis {axis}"
    return None


class Reading(Generic[S]):
    """What is known of the values of a graph, as far as its nodes were read.

    Attributes:
        size: what the symbol that is looked at stands for.
    """

    size = "size of the batch"

    def __init__(self, graph: Graph, symbol: str, states: Sequence[State[S]], nothing: S) -> None:
        """Begin with what is known of the inputs; `nothing` is known of values that do not depend on the symbol."""
        self._graph = graph
        self._symbol = symbol
        self._nothing = nothing
        self._count = number_of(symbol, symbol)
        self._metas: dict[str, ValueMeta] = {value.name: value.meta for value in graph.inputs}
        self._states = {value.name: state for value, state in zip(graph.inputs, states, strict=True)}

    def results(self) -> list[State[S]]:
        """Read every node; return what is known of the outputs."""
        for node in self._graph.nodes:
            try:
                self._states[node.name] = self._state(node)
            except Dependent as reason:
                source = None if node.source is None else self._graph.sources[node.source]
                line = "" if source is None else f" ({source.file}:{source.line})"
                raise Dependent(f"operator `{node.op}`{line} {reason}") from None
            self._metas[node.name] = node.meta
        return [
            self._states.get(output, self._nothing) if isinstance(output, str) else self._nothing
            for output in self._graph.outputs
        ]

    def _computed(self, node: Node, kind: tuple[str, int], call: Call[S]) -> State[S]:
        """Return what is known of the results of an operator of a kind; `Dependent`: it mixes what is kept apart."""
        raise NotImplementedError

    def _state(self, node: Node) -> State[S]:
        arguments = {name: self._bound(name, value) for name, value in _named(node).items()}
        operands = [each for value in arguments.values() for each in elements(value) if isinstance(each, Operand)]
        counts = [name for name, value in arguments.items() if any(map(self._is_count, elements(value)))]
        if node.op == "python::getitem" and isinstance(node.args[0], str) and isinstance(node.args[1], int):
            items = self._states[node.args[0]]
            return items[node.args[1]] if isinstance(items, tuple) else self._nothing
        if isinstance(node.meta, SizeMeta) and node.meta.value is not None:
            return self._nothing  # Its own expression tells whether it depends on the symbol.
        if isinstance(node.meta, records.NothingMeta) and node.op.startswith("aten::") and not written(node.op):
            return self._nothing  # An assertion: where it fails, every call of the batch runs again, alone.
        if node.op in _BODIES:
            return self._of_body(node)
        kind, trailing = _kind(node.op)
        if kind in ("moved", "reshaped"):
            operands = operands[:1]
        if any(name not in _COUNTS.get(kind, ()) for name in counts):
            raise Dependent(f"computes with the {self.size}")
        return self._computed(node, (kind, trailing), Call(arguments, operands, bool(counts)))

    def _of_body(self, node: Node) -> State[S]:
        """Return what is known of the results of a body, by what the call gives to its graph."""
        body, operands = node.args[0], node.args[_BODIES[node.op]]
        assert isinstance(body, records.SubgraphArgument)
        assert isinstance(operands, list)
        states = [self._states[each] if isinstance(each, str) else self._nothing for each in operands]
        try:
            results = type(self)(self._graph.subgraphs[body.name], self._symbol, states, self._nothing).results()
        except Dependent as reason:
            raise Dependent(f"has a body whose {reason}") from None
        return tuple(results[: len(node.meta.items)]) if isinstance(node.meta, SequenceMeta) else results[0]

    def _bound(self, parameter: str, value: Argument) -> Any:
        """Return an argument with an `Operand` in the place of each tensor."""
        if isinstance(value, list):
            return [self._bound(parameter, each) for each in value]
        meta = self._metas.get(value) if isinstance(value, str) else None
        if not isinstance(meta, TensorMeta):
            return value
        state = self._states[str(value)]
        assert not isinstance(state, tuple)
        return Operand(parameter, self._shape(meta), state, meta.dtype == "bool")

    def _is_count(self, value: Any) -> bool:
        """Return whether an argument is a number made of the symbol, or several tensors that depend on it at once."""
        if isinstance(value, str) and isinstance(self._metas.get(value), SequenceMeta):
            return True
        meta = self._metas.get(value) if isinstance(value, str) else value
        size = meta.value if isinstance(meta, SizeMeta | records.SizeArgument) else None
        return size is not None and self._symbol in symbols_of(size)

    def _shape(self, meta: TensorMeta) -> tuple[int, ...]:
        return tuple(number_of(size, self._symbol) for size in meta.shape)


class _RowReading(Reading[Rows | None]):
    """Where the values of a graph have rows; None: they have none, and do not depend on their number."""

    def _computed(self, node: Node, kind: tuple[str, int], call: Call[Rows | None]) -> State[Rows | None]:
        (name, trailing), operands = kind, call.operands
        with_rows = [each for each in operands if each.rows is not None]
        if with_rows and not name:
            raise Dependent("is not known to keep rows apart")
        if any(each.rows and each.rows.numbered for each in with_rows) and name not in (*_KEEPS_NUMBERS, "indexed"):
            raise Dependent("computes with the number of each row")
        if with_rows or call.counts:
            RULES[name](call, trailing)
        state = self._placed(node.meta, name if with_rows or call.counts else "", with_rows)
        for each in operands:
            if each.parameter in written(node.op) and each.rows != state:
                raise Dependent(f"writes rows to `{each.parameter}`, which does not have them on that axis")
        return state

    def _placed(self, meta: ValueMeta, kind: str, operands: Sequence[Operand[Rows | None]]) -> State[Rows | None]:
        """Return where a result has rows: on the one axis whose size depends on their number."""
        if isinstance(meta, SequenceMeta):
            return tuple(self._placed(item, kind, operands) for item in meta.items)
        shape = meta.shape if isinstance(meta, TensorMeta) else ()
        axes = [axis for axis, size in enumerate(shape) if self._symbol in symbols_of(size)]
        if not axes and (not operands or kind == "filled" or 0 in shape):
            return None
        if len(axes) != 1 or not isinstance(meta, TensorMeta):
            raise Dependent("has a result with rows on several axes" if axes else "has a result without rows")
        sizes = self._shape(meta)
        after, rest = divmod(sizes[axes[0]], self._count)
        if rest:
            raise Dependent("has a result whose size is no multiple of the number of rows")
        source = operands[0] if operands and kind != "filled" else None
        if source is None or source.rows is None:
            if kind not in ("filled", "expanded", "numbered"):
                raise Dependent("has as many elements as there are rows")
            return Rows(axes[0], 1, after, kind == "numbered")
        if kind == "reshaped":
            return reshaped(source.rows, source.shape, sizes, axes[0], self._count)
        if sizes[axes[0]] != source.shape[source.rows.axis]:
            raise Dependent("changes the number of rows")
        return replace(source.rows, axis=axes[0], numbered=source.rows.numbered and kind in _KEEPS_NUMBERS)


def _parameters(op: str) -> tuple[Parameter, ...]:
    """Return the parameters of an operator of aten; of others, which have no names, none."""
    signature = signature_of(aten_signatures().get(op.removeprefix("aten::"), ""))
    return (*signature.positional, *signature.keyword_only) if signature else ()


@lru_cache(maxsize=4096)
def _defaults(op: str) -> dict[str, Any]:
    return {each.name: _literal(each.default) for each in _parameters(op)}


def written(op: str) -> set[str]:
    """Return the parameters that an operator of aten writes to."""
    return {each.name for each in _parameters(op) if "!" in each.alias}


def may_share(op: str) -> bool:
    """Return whether results of an operator may have the memory of its first argument."""
    is_moved = _kind(op)[0] in ("moved", "reshaped")
    return op == "python::getitem" or is_moved or any(each.alias for each in _parameters(op))


def _literal(default: str | None) -> Any:
    try:
        return ast.literal_eval(default or "None")
    except (ValueError, SyntaxError):  # None there is, and names of enumerations.
        return None


def _named(node: Node) -> dict[str, Any]:
    defaults = _defaults(node.op)
    names = [*defaults, *map(str, range(len(defaults), len(node.args)))]
    return defaults | dict(zip(names, node.args, strict=False)) | node.kwargs


def _kind(op: str) -> tuple[str, int]:
    """Return the kind of an operator, empty if it has none; what it does in place is what it does otherwise."""
    none = ("", 0)
    name = op.removeprefix("aten::")
    base = name.partition(".")[0]
    if name == op or "out" in _defaults(op):
        return none
    if name in kinds() or base in kinds():
        return kinds().get(name) or kinds()[base]
    found = kinds().get(base[:-1], none) if base.endswith("_") and not base.endswith("__") else none
    return none if found[0] in ("moved", "reshaped", "expanded") else found  # Other metadata of a tensor.
