"""Live graphs: forward graphs that call submodules that changed, in place of the nodes captured of them.

A forward graph says which of its nodes were a call of which submodule (`Graph.calls`). For every submodule that
changed, one call of its current module replaces these nodes, with the values that the original took. In that call, a
submodule that only got hooks, or whose weights are now computed, runs the nodes.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from torch import nn

from aotexport_runtime.engines.forward.submodule_call import (
    Need,
    Part,
    Result,
    SubmoduleCall,
    leaves_of,
    without_values,
)
from aotexport_runtime.errors import NotSupported
from aotexport_runtime.execution.codegen import CALL_SUBMODULE, Environment
from aotexport_runtime.rewrite.names import (
    names_in,
    operands,
    rename,
    renamed,
    returned_operand,
    writes_in_place,
)
from aotexport_runtime.schema.graph import Graph, ModuleCall, Node
from aotexport_runtime.schema.program import Program, StateInput
from aotexport_runtime.schema.trees import Leaf
from aotexport_runtime.schema.values import Argument, SequenceMeta, ValueMeta
from aotexport_runtime.submodules.changes import SubmoduleChange
from aotexport_runtime.submodules.places import is_below, module_at
from aotexport_runtime.validate import references
from aotexport_runtime.values.trees import leaves

UNUSED = "nothing uses a part of what it takes or returns, which the graph does not hold"
"""Why calls of a submodule cannot be followed that the graph lacks values of."""

_FOR_ALL_SIZES = frozenset(
    f"aten::{name}.default" for name in ("dropout", "exp", "gelu", "log", "neg", "relu", "sigmoid", "silu", "tanh")
) | {"aten::log_softmax.int", "aten::softmax.int"}
"""Operators whose results have the shape of their first argument, and that take no other size."""

_REDUCTIONS = frozenset(("aten::cross_entropy_loss.default",))
"""Operators whose results have a shape of their own, and that take no size."""


class CannotFollow(NotSupported):
    """A change of the submodule at `path` that calls cannot follow."""

    def __init__(self, path: str, message: str) -> None:
        super().__init__(message)
        self.path = path


@dataclass(frozen=True)
class LiveGraph:
    """A forward graph that calls the submodules that changed.

    Attributes:
        graph: its record.
        environment: with the functions that call them.
        reads: names of the graph inputs that it reads.
        reasons: the changes, a sentence each.
        added: the adapters and submodules that it calls and that hold parameters of their own.
    """

    graph: Graph
    environment: Environment
    reads: frozenset[str]
    reasons: tuple[str, ...]
    added: tuple[nn.Module, ...] = ()


def live_graph(
    graph: Graph,
    program: Program,
    changes: Sequence[SubmoduleChange],
    names: Mapping[str, Sequence[str]],
    environment: Environment,
) -> LiveGraph | None:
    """Return a forward graph that calls the submodules that changed; None: the program calls none of them.

    `names` are those of each state tensor, by its first.

    Raises:
        CannotFollow: a change that calls of the program cannot follow.
    """
    called = {graph.modules[call.module] for call in graph.calls}
    told = {graph.modules[call.module] for call in graph.calls if call.refusal is None}
    # If only the computation of tensors changed, the program reads the computed tensors without a call.
    changes = [change for change in changes if change.path in told or not change.computes_state]
    replaced = [change.path for change in changes if change.path in called and not change.runs_part]
    changes = [change for change in changes if not any(change.path.startswith(f"{path}.") for path in replaced)]
    for change in changes:
        _check_can_follow(change, change.path in called, graph, program)
    followed = {change.path: change for change in changes if change.path in called}
    if not followed:
        return None
    outline = _Outline(graph, followed, program, names, environment)
    nodes = outline.nodes(0, len(graph.nodes), None)
    outputs = [outline.renamed(output) for output in graph.outputs]
    live = msgspec.structs.replace(graph, nodes=tuple(nodes), outputs=outputs, calls=())
    reasons = tuple(f"`{change.path}` {change.how}" for change in followed.values())
    return whole_graph(live, outline.environment, reasons)


def whole_graph(graph: Graph, environment: Environment, reasons: tuple[str, ...] = ()) -> LiveGraph:
    """Return a live graph of the nodes of `graph` as they are."""
    used = {name for node in graph.nodes for name in operands(node)}
    used.update(names_in(graph.outputs))
    reads = frozenset(value.name for value in graph.inputs if value.name in used)
    return LiveGraph(graph, environment, reads, reasons)


def _check_can_follow(change: SubmoduleChange, is_called: bool, graph: Graph, program: Program) -> None:
    if is_called and change.module is None:
        raise CannotFollow(
            change.path,
            f"`{change.path}` {change.how}, and program `{program.name}` calls it. Put a module in its place "
            "(`torch.nn.Identity()` passes on what it gets)",
        )
    if is_called or not change.needs_call:
        if not graph.calls and graph.nodes:
            raise CannotFollow(
                change.path,
                f"`{change.path}` {change.how}, and program `{program.name}` does not say which of its nodes are calls "
                "of it: it was exported with `--strip`, by an older exporter, or not by a direct trace. Change the "
                "model, and export it again",
            )
        return
    raise CannotFollow(
        change.path,
        f"`{change.path}` {change.how}, and program `{program.name}` does not call it: what the model's code read of "
        "it was fixed at export. Change the model, and export it again",
    )


class _Outline:
    """Nodes of a forward graph, with calls of changed submodules in place of their nodes."""

    def __init__(
        self,
        graph: Graph,
        changes: Mapping[str, SubmoduleChange],
        program: Program,
        names: Mapping[str, Sequence[str]],
        environment: Environment,
    ) -> None:
        self._graph = graph
        self._changes = changes
        self._state = {
            value.name: names[spec.name]
            for value, spec in zip(graph.inputs, program.inputs, strict=True)
            if isinstance(spec, StateInput)
        }
        self._callables: dict[str, Callable[..., Any]] = dict(environment.submodules)
        self.environment = dataclasses.replace(environment, submodules=self._callables)
        self._names: dict[str, str] = {}
        self._metas: dict[str, ValueMeta] = {value.name: value.meta for value in (*graph.inputs, *graph.nodes)}
        self._made = {node.name: index for index, node in enumerate(graph.nodes)}
        self._elsewhere = {
            index
            for call in graph.calls
            if (change := changes.get(graph.modules[call.module])) is not None and not change.runs_part
            for index in range(call.begin, call.end)
        }
        self._uses: dict[str, list[int]] = {}
        for index, node in enumerate(graph.nodes):
            for name in operands(node):
                self._uses.setdefault(name, []).append(index)
        # One tensor may be several leaves of a result.
        returned = Counter(leaf.index for _, leaf in leaves(program.output_tree) if isinstance(leaf, Leaf))
        for index, output in enumerate(graph.outputs):
            for name in references(output):
                self._uses.setdefault(name, []).extend([len(graph.nodes)] * max(returned[index], 1))

    def renamed(self, argument: Argument) -> Argument:
        return rename(argument, self._names)

    def nodes(self, begin: int, end: int, within: int | None) -> list[Node]:
        """Return the new nodes in place of nodes `begin` to `end`, a part of call `within`."""
        result: list[Node] = []
        position = begin
        for index in self._outermost(within):
            call = self._graph.calls[index]
            result += map(self._renamed_node, self._graph.nodes[position : call.begin])
            result += self._call(index, call)
            position = call.end
        return [*result, *map(self._renamed_node, self._graph.nodes[position:end])]

    def _renamed_node(self, node: Node) -> Node:
        return renamed(node, self._names) if self._names else node

    def _outermost(self, within: int | None) -> list[int]:
        """Return the outermost calls of changed submodules within call `within`."""
        inside = {within}
        found: list[int] = []
        for index, call in enumerate(self._graph.calls):
            if call.parent in inside and (within is None or index > within):
                if self._graph.modules[call.module] in self._changes:
                    found.append(index)
                else:
                    inside.add(index)
        return found

    def _call(self, index: int, call: ModuleCall) -> Iterator[Node]:
        path = self._graph.modules[call.module]
        change = self._changes[path]
        assert change.module is not None
        if call.refusal is not None or call.arguments is None or call.result is None:
            raise self._refused(change, f"what calls do with it cannot be told apart from the rest ({call.refusal})")
        taken, returned = leaves_of(call.arguments), leaves_of(call.result)
        if without_values(call, returned=change.runs_part):
            raise self._refused(change, UNUSED)
        # Read before this call's results get new names.
        inputs = {i: self.renamed(call.values[i]) for i in taken}
        part = self._part(index, path, taken, returned) if change.runs_part else None
        results = self._results(call, change, returned)
        captured = [] if part is None else part.captured
        name = f"{CALL_SUBMODULE} {index}"
        self._callables[name] = SubmoduleCall(change, call, inputs, results, part, self.environment)
        values = [value for value in inputs.values() if isinstance(value, str)]
        meta = SequenceMeta(items=tuple(result.meta for result in results))
        yield Node(name=name, op=CALL_SUBMODULE, args=[[*values], [*captured]], meta=meta)
        for place, result in enumerate(results):
            yield Node(name=result.name, op="python::getitem", args=[name, place], meta=result.meta)

    def _part(self, index: int, path: str, taken: set[int], returned: set[int]) -> Part:
        call = self._graph.calls[index]
        before = dict(self._names)
        # Inside the call, its arguments have their original names.
        arguments = {i: value for i in taken if isinstance(value := call.values[i], str)}
        for value in arguments.values():
            self._names.pop(value, None)
        nodes = self.nodes(call.begin, call.end, index)
        outputs = {i: self.renamed(call.values[i]) for i in returned}
        self._names = before
        made = {node.name for node in nodes}
        needed = list(dict.fromkeys(n for node in nodes for n in operands(node)))
        needed += [value for value in outputs.values() if isinstance(value, str)]
        outside = [n for n in dict.fromkeys(needed) if n not in made and n not in arguments.values()]
        own = {name: alias for name in outside if (alias := self._own(name, path)) is not None}
        captured = [name for name in outside if name not in own]
        graph = msgspec.structs.replace(self._graph, nodes=tuple(nodes), outputs=[*outputs.values()], calls=())
        return Part(arguments=arguments, captured=captured, own=own, metas=self._metas, graph=graph, outputs=[*outputs])

    def _own(self, name: str, path: str) -> str | None:
        """Return the name of a graph input among the state below `path`; None: it is no state of that module."""
        prefix = f"{path}."
        names = self._state.get(name, ())
        return next((alias.removeprefix(prefix) for alias in names if alias.startswith(prefix)), None)

    def _results(self, call: ModuleCall, change: SubmoduleChange, returned: set[int]) -> list[Result]:
        """Return the results of a call that later nodes use; arguments that it returns get new names."""
        inside = range(call.begin, call.end)
        by_name = {value: i for i in sorted(returned) if isinstance(value := call.values[i], str)}
        results: list[Result] = []
        for index in inside:
            node = self._graph.nodes[index]
            if node.name not in by_name and any(use not in inside for use in self._uses.get(node.name, ())):
                raise self._refused(change, f"the program uses `{node.name}` of it, which it does not return")
        for value, i in by_name.items():
            later = [use for use in self._uses.get(value, ()) if use >= call.end]
            if not later:
                continue
            made_inside = self._made.get(value, -1) in inside
            same_as = self._tensor_outside(value, inside) if made_inside else value
            told_apart = self._later(value, call.end) < 2
            results.append(
                Result(
                    name=value if made_inside else f"{value} of {CALL_SUBMODULE} {len(self._callables)}",
                    leaf=i,
                    meta=self._metas[value],
                    needs=self._needs(value, later),
                    # Users of the result and users of the tensor that it is cannot be told apart.
                    must_be=None if told_apart else same_as,
                )
            )
            if not made_inside:
                self._names[value] = results[-1].name
        return results

    def _needs(self, value: str, uses: Iterable[int]) -> Need:
        """Return the properties of a value that must be as at capture for these uses; see `Need`."""
        needs: set[Need] = {"nothing"}
        for use in uses:
            # The caller, and modules that run their own code, take what they are given.
            if use == len(self._graph.nodes) or use in self._elsewhere:
                continue
            node = self._graph.nodes[use]
            if not node.args or node.args[0] != value or operands(node).count(value) > 1:
                needs.add("shape")
            elif node.op in _FOR_ALL_SIZES:
                needs |= {"rank", self._needs(node.name, self._uses.get(node.name, ()))}
            else:
                needs.add("rank" if node.op in _REDUCTIONS else "shape")
        return next(need for need in ("shape", "rank", "nothing") if need in needs)

    def _tensor_outside(self, value: str, inside: range) -> str | None:
        """Return the outside value whose tensor `value` is, changed in place or not; None: it is one of its own."""
        while self._made.get(value, -1) in inside:
            operand = self._operand(self._graph.nodes[self._made[value]])
            if operand is None:
                return None
            value = operand
        return value

    def _made_by(self, value: str) -> Node | None:
        return self._graph.nodes[self._made[value]] if value in self._made else None

    def _operand(self, node: Node) -> str | None:
        return returned_operand(node, self._made_by, self._metas)

    def _later(self, value: str, end: int) -> int:
        """Return how often nodes from `end` on take the tensor `value`, also by the names that nodes give it anew."""
        count = 0
        for use in self._uses.get(value, ()):
            node = self._graph.nodes[use] if end <= use < len(self._graph.nodes) else None
            if node is not None and not writes_in_place(node.op) and self._operand(node) == value:
                count += self._later(node.name, end)
            else:
                count += use >= end
        return count

    def _refused(self, change: SubmoduleChange, reason: str) -> CannotFollow:
        return CannotFollow(
            change.path,
            f"`{change.path}` {change.how}, and no call can follow: {reason}. Change the model, and export it again",
        )


def graph_of_calls(
    whole: nn.Module,
    graph: Graph,
    program: Program,
    changes: Sequence[SubmoduleChange],
    names: Mapping[str, Sequence[str]],
    environment: Environment,
) -> tuple[LiveGraph | None, set[str]]:
    """Return a forward graph that calls every submodule that it can, and the paths of those that it cannot.

    For other arguments than the loaded module, and errors, see `live_graph`.
    """
    changed = [change.path for change in changes]
    paths = {graph.modules[call.module] for call in graph.calls if call.refusal is None}
    apart = {path for path in paths if not any(path == other or is_below(path, other) for other in changed)}
    modules = {path: module_at(whole, path) for path in sorted(apart)}
    shown = {
        path: SubmoduleChange(path, module, "is called", runs_part=True) for path, module in modules.items() if module
    }
    while True:
        try:
            live = live_graph(graph, program, [*changes, *shown.values()], names, environment)
            break
        except CannotFollow as error:
            if shown.pop(error.path, None) is None:
                raise
    return live, {path for path, _ in whole.named_modules() if path} - shown.keys() - {*changed}
