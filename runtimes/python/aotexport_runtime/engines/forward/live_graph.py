"""Live graphs: forward graphs that call adapters, and submodules that changed in place of the nodes captured of them.

A forward graph says which of its nodes were a call of which submodule (`Graph.calls`). For every submodule that
changed, one call of its current module replaces these nodes. In that call, a submodule that only got hooks, or whose
weights are now computed, runs the nodes.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from torch import nn

from aotexport_runtime.engines.forward.any_size import REDUCTIONS, takes_any_size, without_size
from aotexport_runtime.engines.forward.readers import Operands, Readers
from aotexport_runtime.engines.forward.submodule_call import (
    Need,
    Part,
    Result,
    SubmoduleCall,
    leaves_of,
    without_values,
)
from aotexport_runtime.errors import NotSupported
from aotexport_runtime.execution.codegen import CALL_SUBMODULE, Environment, compile_graph
from aotexport_runtime.rewrite.names import names_in, operands, rename, renamed, returned_operand, writes_in_place
from aotexport_runtime.schema.graph import Graph, ModuleCall, Node
from aotexport_runtime.schema.program import Program, StateInput
from aotexport_runtime.schema.trees import Leaf
from aotexport_runtime.schema.values import Argument, SequenceMeta, SizeArgument, SizeMeta, ValueMeta
from aotexport_runtime.submodules.adapter import Adapter
from aotexport_runtime.submodules.changes import SubmoduleChange
from aotexport_runtime.submodules.tables import is_below, module_at, named
from aotexport_runtime.values.trees import leaves

UNUSED = "nothing uses a part of what it takes or returns, which the graph does not hold"
"""Why calls of a submodule cannot be followed that the graph lacks values of."""

_AGAIN = "Change the model, and export it again"


class CannotFollow(NotSupported):
    """A change of the submodule at `path` that calls cannot follow."""

    def __init__(self, change: SubmoduleChange, why: str) -> None:
        super().__init__(f"`{change.path}` {change.how}, and {why}")
        self.path = change.path


@dataclass(frozen=True, kw_only=True)
class LiveGraph:
    """A forward graph that calls adapters and the submodules that changed.

    Attributes:
        environment: its environment, with the functions that call them.
        reads: names of the graph inputs that it reads.
        reasons: the changes, a sentence each.
        added: the adapters and submodules that hold parameters of their own.
    """

    graph: Graph
    environment: Environment
    reads: frozenset[str]
    reasons: tuple[str, ...]
    added: tuple[nn.Module, ...]


def live_graph(
    graph: Graph,
    program: Program,
    changes: Sequence[SubmoduleChange],
    adapters: Sequence[tuple[str, Adapter]],
    names: Mapping[str, Sequence[str]],
    environment: Environment,
) -> LiveGraph | None:
    """Return a forward graph that calls adapters and the submodules that changed; None: the program calls none of them.

    `adapters` are given with the paths of their modules, `names` are those of each state tensor, by its first.

    Raises:
        CannotFollow: a change that calls of the program cannot follow.
    """
    called = {graph.modules[call.module] for call in graph.calls}
    told = {graph.modules[call.module] for call in graph.calls if call.refusal is None}
    # If only the computation of tensors changed, the program reads the computed tensors without a call.
    needed = [change for change in changes if change.path in told or not change.computes_state]
    replaced = [change.path for change in needed if change.path in called and not change.runs_part]
    needed = [change for change in needed if not any(is_below(change.path, path) for path in replaced)]
    for change in needed:
        _check_can_follow(change, change.path in called, graph, program)
    followed = {change.path: change for change in needed if change.path in called}
    outline = _Outline(graph, followed, program, adapters, names, environment)
    if not followed and not outline.adapted:
        return None
    nodes = (*outline.first, *outline.nodes(0, len(graph.nodes), None))
    outputs = [outline.renamed(output) for output in graph.outputs]
    used = {*names_in(outputs), *(name for node in nodes for name in operands(node))}
    reasons = [f"`{change.path}` {change.how}" for change in followed.values()]
    put_in = (change.module for change in changes if change.module is not None and not change.keeps_state)
    return LiveGraph(
        graph=msgspec.structs.replace(graph, nodes=nodes, outputs=outputs, calls=()),
        environment=outline.environment,
        reads=frozenset(value.name for value in graph.inputs if value.name in used),
        reasons=(*reasons, *(f"`{name}` has an adapter" for name in outline.adapted[:1])),
        added=(*(adapter for _, adapter in adapters), *put_in),
    )


def _check_can_follow(change: SubmoduleChange, is_called: bool, graph: Graph, program: Program) -> None:
    if is_called and change.module is None:
        why = "calls it. Put a module in its place (`torch.nn.Identity()` passes on what it gets)"
    elif change.needs_call and not is_called:
        why = f"does not call it: what the model's code read of it was fixed at export. {_AGAIN}"
    elif not graph.calls and graph.nodes:
        why = (
            "does not say which of its nodes are calls of it: it was exported with `--strip`, by an older exporter, or "
            f"not by a direct trace. {_AGAIN}"
        )
    else:
        return
    raise CannotFollow(change, f"program `{program.name}` {why}")


def _refused(change: SubmoduleChange, reason: str) -> CannotFollow:
    return CannotFollow(change, f"no call can follow: {reason}. {_AGAIN}")


def _without_symbols(function: Callable[..., Any], symbols: Any, *args: Any) -> Any:
    return function(*args)


class _Outline:
    """Nodes of a forward graph, with calls of changed submodules in place of their nodes."""

    def __init__(
        self,
        graph: Graph,
        changes: Mapping[str, SubmoduleChange],
        program: Program,
        adapters: Sequence[tuple[str, Adapter]],
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
        self.first: list[Node] = []
        self._places: dict[str, tuple[Operands, str | None]] = {}
        # What the calls around the current one return, outermost first.
        self._outer: list[set[str]] = []
        self._callables: dict[str, Callable[..., Any]] = dict(environment.submodules)
        self.environment = dataclasses.replace(environment, submodules=self._callables)
        self._names: dict[str, Argument] = {}
        self._metas: dict[str, ValueMeta] = {value.name: value.meta for value in (*graph.inputs, *graph.nodes)}
        self._nodes = {node.name: node for node in graph.nodes}
        self._made = {name: index for index, name in enumerate(self._nodes)}
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
            for name in names_in([output]):
                self._uses.setdefault(name, []).extend([len(graph.nodes)] * max(returned[index], 1))
        self.adapted: list[str] = []
        self._adapt(Readers(graph, program), adapters, {name: group for group in names.values() for name in group})

    def _adapt(
        self, readers: Readers, adapters: Sequence[tuple[str, Adapter]], all_names: Mapping[str, Sequence[str]]
    ) -> None:
        """Call adapters before all nodes (`first`), or after those that read a tensor; note the tensors' names."""
        for path, adapter in adapters:
            name = named(path, adapter.tensor)
            names = all_names.get(name, (name,))
            value, found = readers.value(names), readers.of(names, path)
            if not found:
                continue
            self.adapted.append(name)
            if adapter.in_weight and value is not None:
                new = self._names[value] = f"{value} of {name}"
                self._callables[new] = functools.partial(_without_symbols, adapter.adapted_tensor)
                self.first.append(Node(name=new, op=CALL_SUBMODULE, args=[value], meta=self._metas[value]))
            for each in found if not adapter.in_weight else ():
                if each.node is not None and each.operands is not None:
                    self._callables[each.node.name] = functools.partial(_without_symbols, adapter.adapted)
                    self._places[each.node.name] = each.operands, each.value

    def renamed(self, argument: Argument) -> Argument:
        return rename(argument, self._names)

    def nodes(self, begin: int, end: int, within: int | None) -> list[Node]:
        """Return the new nodes in place of nodes `begin` to `end`, a part of call `within`."""
        result: list[Node] = []
        for index in self._outermost(within):
            call = self._graph.calls[index]
            result += self._kept(begin, call.begin)
            result += self._call(index, call)
            begin = call.end
        return [*result, *self._kept(begin, end)]

    def _kept(self, begin: int, end: int) -> Iterator[Node]:
        """Yield nodes with their new operands, and the calls of adapters after them."""
        for node in self._graph.nodes[begin:end]:
            node = without_size(node, self._metas.get(str(node.args[0])) if node.args and self._changes else None)
            node = renamed(node, self._names) if self._names else node
            if node.name in self._places:
                places, weight = self._places[node.name]
                own = msgspec.structs.replace(node, name=f"{node.name} without adapter")
                yield own
                bias = None if places.bias is None or places.bias >= len(node.args) else node.args[places.bias]
                args: list[Argument] = [own.name, node.args[places.x], self.renamed(weight), bias]
                node = msgspec.structs.replace(node, op=CALL_SUBMODULE, args=args, kwargs={})
            yield node

    def _outermost(self, within: int | None) -> list[int]:
        """Return the outermost calls of changed submodules within call `within`."""
        inside = {within}
        found: list[int] = []
        for index, call in enumerate(self._graph.calls):
            if call.parent in inside:
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
            raise _refused(change, f"what calls do with it cannot be told apart from the rest ({call.refusal})")
        taken, returned = leaves_of(call.arguments), leaves_of(call.result)
        if without_values(call, returned=change.runs_part):
            raise _refused(change, UNUSED)
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
        self._outer.append({str(call.values[i]) for i in returned})
        nodes = self.nodes(call.begin, call.end, index)
        self._outer.pop()
        outputs = {i: self.renamed(call.values[i]) for i in returned}
        self._names = before
        made = {node.name for node in nodes}
        needed = [*(name for node in nodes for name in operands(node)), *names_in(outputs.values())]
        outside = [name for name in dict.fromkeys(needed) if name not in made and name not in arguments.values()]
        aliases = ((name, alias) for name in outside for alias in self._state.get(name, ()))
        own = {name: alias.removeprefix(f"{path}.") for name, alias in aliases if is_below(alias, path)}
        captured = [name for name in outside if name not in own]
        graph = msgspec.structs.replace(self._graph, nodes=tuple(nodes), outputs=[*outputs.values()], calls=())
        names = [*arguments.values(), *captured, *own]
        return Part(
            arguments=arguments,
            captured=captured,
            own=own,
            metas=self._metas,
            outputs=[*outputs],
            compiled=functools.cache(lambda: compile_graph(graph, nodes, names, graph.outputs, self.environment)),
        )

    def _results(self, call: ModuleCall, change: SubmoduleChange, returned: set[int]) -> list[Result]:
        """Return the results of a call that later nodes use; arguments that it returns get new names."""
        inside = range(call.begin, call.end)
        by_name = {value: i for i in sorted(returned) if isinstance(value := call.values[i], str)}
        results, new_names = list[Result](), dict[str, Argument]()
        for index in inside:
            node = self._graph.nodes[index]
            if node.name in by_name or all(use in inside for use in self._uses.get(node.name, ())):
                continue
            if not isinstance(node.meta, SizeMeta) or node.meta.value is None:
                raise _refused(change, f"the program uses `{node.name}` of it, which it does not return")
            # Sizes follow from those of the program's inputs.
            new_names[node.name] = SizeArgument(value=node.meta.value)
        for value, i in by_name.items():
            later = [use for use in self._uses.get(value, ()) if use >= call.end]
            if not later and not any(value in returned for returned in self._outer):
                continue
            made_inside = self._made.get(value) in inside
            same_as = self._tensor_outside(value, inside)
            # Users of the result and users of the tensor that it is cannot be told apart.
            must_be = None if same_as is None or self._later(value, call.end) < 2 else str(self.renamed(same_as))
            name = value if made_inside else f"{value} of {CALL_SUBMODULE} {len(self._callables)}"
            needs = self._needs(value, later)
            results.append(Result(name=name, leaf=i, meta=self._metas[value], needs=needs, must_be=must_be))
            new_names |= {} if made_inside else {value: name}
        self._names |= new_names
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
            elif takes_any_size(node, self._metas[value]):
                needs |= {"rank", self._needs(node.name, self._uses.get(node.name, ()))}
            else:
                needs.add("rank" if node.op in REDUCTIONS else "shape")
        return next(need for need in ("shape", "rank", "nothing") if need in needs)

    def _tensor_outside(self, value: str, inside: range) -> str | None:
        """Return the outside value whose tensor `value` is, changed in place or not; None: it is one of its own."""
        while self._made.get(value) in inside:
            operand = self._operand(self._nodes[value])
            if operand is None:
                return None
            value = operand
        return value

    def _operand(self, node: Node) -> str | None:
        return returned_operand(node, self._nodes.get, self._metas)

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


def graph_of_calls(
    whole: nn.Module,
    graph: Graph,
    changes: Sequence[SubmoduleChange],
    make: Callable[[Sequence[SubmoduleChange]], LiveGraph | None],
) -> tuple[LiveGraph | None, set[str]]:
    """Return a forward graph that calls every submodule that it can, and the paths of those that it cannot.

    `make` returns a live graph of the forward `graph`; see `live_graph`.
    """
    changed = [change.path for change in changes]
    shown = {
        path: SubmoduleChange(path, module, "is called", keeps_state=True, runs_part=True)
        for path in sorted({graph.modules[call.module] for call in graph.calls if call.refusal is None})
        if path not in changed
        if (module := module_at(whole, path)) is not None
    }
    while True:
        try:
            live = make([*changes, *shown.values()])
            return live, {path for path, _ in whole.named_modules() if path} - shown.keys() - {*changed}
        except CannotFollow as error:
            if shown.pop(error.path, None) is None:
                raise
