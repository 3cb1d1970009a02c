"""Calls of submodules that changed, in the place of what a forward graph holds of them.

A forward graph says which of its nodes were a call of which submodule (`Graph.calls`). For every submodule that
changed, these nodes make way for one call of the module that stands there now, with the values that the original took.
A submodule that only got hooks, or whose weights are computed now, does in that call what the nodes do.
"""

# The tables of a module have no public names.
# pyright: reportPrivateUsage=false

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import torch
from torch import nn

from aotexport_runtime import dtypes, sizes
from aotexport_runtime.call.signature import Signature
from aotexport_runtime.engines.codegen import Environment, Function, compile_graph, constant_value
from aotexport_runtime.errors import NotSupported
from aotexport_runtime.schema.graph import Graph, ModuleCall, Node
from aotexport_runtime.schema.program import Parameter, Program, StateInput
from aotexport_runtime.schema.trees import Constant, Leaf, Tree
from aotexport_runtime.schema.trees import Sequence as SequenceTree
from aotexport_runtime.schema.values import Argument, SequenceMeta, SizeArgument, TensorMeta, ValueMeta
from aotexport_runtime.submodules import Change, running
from aotexport_runtime.trees import builder, leaves
from aotexport_runtime.validate import references

CALL = "submodule::call"
"""Operator of nodes that call a submodule: its arguments are the values that the call takes."""


class CannotFollow(NotSupported):
    """A change of a submodule that calls cannot follow.

    Attributes:
        path: path of the submodule.
    """

    def __init__(self, path: str, message: str) -> None:
        super().__init__(message)
        self.path = path


@dataclass(frozen=True)
class LiveGraph:
    """A forward graph that calls the submodules that changed.

    Attributes:
        graph: its record.
        environment: with what calls them.
        reads: names of the graph inputs that it reads.
        reasons: what changed, a sentence each.
    """

    graph: Graph
    environment: Environment
    reads: frozenset[str]
    reasons: tuple[str, ...]


def live_graph(
    graph: Graph,
    program: Program,
    changes: Sequence[Change],
    names: Mapping[str, Sequence[str]],
    environment: Environment,
) -> LiveGraph | None:
    """Return a forward graph that calls the submodules that changed; None: the program calls none of them.

    Args:
        graph: the forward graph.
        program: its program.
        changes: what changed.
        names: every name of each state tensor, by its first.
        environment: see `compile_graph`.

    Raises:
        CannotFollow: a change that calls of the program cannot follow.
    """
    called = {graph.modules[call.module] for call in graph.calls}
    told = {graph.modules[call.module] for call in graph.calls if call.refusal is None}
    # What is computed otherwise is read wherever it is used.
    changes = [change for change in changes if change.path in told or not change.computes_state]
    replaced = [change.path for change in changes if change.path in called and not change.runs_part]
    changes = [change for change in changes if not any(change.path.startswith(f"{path}.") for path in replaced)]
    for change in changes:
        _check_can_follow(change, change.path in called, graph, program)
    followed = {change.path: change for change in changes if change.path in called}
    if not followed:
        return None
    state = {
        value.name: names[spec.name]
        for value, spec in zip(graph.inputs, program.inputs, strict=True)
        if isinstance(spec, StateInput)
    }
    outline = _Outline(graph, followed, state, environment)
    nodes = outline.nodes(0, len(graph.nodes), None)
    outputs = [outline.renamed(output) for output in graph.outputs]
    live = msgspec.structs.replace(graph, nodes=tuple(nodes), outputs=outputs, calls=())
    used = {name for node in nodes for name in _operands(node)} | {n for o in outputs for n in references(o)}
    reads = frozenset(value.name for value in graph.inputs if value.name in used)
    reasons = tuple(f"`{change.path}` {change.how}" for change in followed.values())
    return LiveGraph(live, outline.environment, reads, reasons)


def _check_can_follow(change: Change, is_called: bool, graph: Graph, program: Program) -> None:
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
    """Nodes of a forward graph with calls of submodules in the place of their nodes."""

    def __init__(
        self, graph: Graph, changes: Mapping[str, Change], state: Mapping[str, Sequence[str]], environment: Environment
    ) -> None:
        self._graph = graph
        self._changes = changes
        self._state = state
        self._callables: dict[str, SubmoduleCall] = {}
        self.environment = dataclasses.replace(environment, submodules=self._callables)
        self._names: dict[str, str] = {}
        self._metas: dict[str, ValueMeta] = {value.name: value.meta for value in (*graph.inputs, *graph.nodes)}
        self._made = {node.name: index for index, node in enumerate(graph.nodes)}
        self._uses: dict[str, list[int]] = {}
        for index, node in enumerate(graph.nodes):
            for name in _operands(node):
                self._uses.setdefault(name, []).append(index)
        for output in graph.outputs:
            for name in references(output):
                self._uses.setdefault(name, []).append(len(graph.nodes))

    def renamed(self, argument: Argument) -> Argument:
        """Return an argument with values as they are called now."""
        if isinstance(argument, str):
            return self._names.get(argument, argument)
        return [self.renamed(item) for item in argument] if isinstance(argument, list) else argument

    def nodes(self, begin: int, end: int, within: int | None) -> list[Node]:
        """Return the nodes from `begin` to `end`, parts of call `within`."""
        result: list[Node] = []
        position = begin
        for index in self._outermost(within):
            call = self._graph.calls[index]
            result += map(self._renamed_node, self._graph.nodes[position : call.begin])
            result += self._call(index, call)
            position = call.end
        return [*result, *map(self._renamed_node, self._graph.nodes[position:end])]

    def _renamed_node(self, node: Node) -> Node:
        if not self._names:
            return node
        kwargs = {key: self.renamed(value) for key, value in node.kwargs.items()}
        return msgspec.structs.replace(node, args=[self.renamed(arg) for arg in node.args], kwargs=kwargs)

    def _outermost(self, within: int | None) -> list[int]:
        """Return the calls in call `within` that are to be made, but for those in others of them."""
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
        taken, returned = _leaves(call.arguments), _leaves(call.result)
        gone = [i for i in taken | (returned if change.runs_part else set()) if call.values[i] is None]
        if gone:
            raise self._refused(
                change, "nothing uses a part of what it takes or returns, which the graph does not hold"
            )
        # Read before this call's results get new names.
        inputs = {i: self.renamed(call.values[i]) for i in taken}
        part = self._part(index, path, taken, returned, inputs) if change.runs_part else None
        results = self._results(call, change, returned)
        captured = [] if part is None else part.captured
        name = f"{CALL} {index}"
        self._callables[name] = SubmoduleCall(path, change, call, inputs, results, part, self.environment)
        values = [value for value in inputs.values() if isinstance(value, str)]
        meta = SequenceMeta(items=tuple(result.meta for result in results))
        yield Node(name=name, op=CALL, args=[[*values], [*captured]], meta=meta)
        for place, result in enumerate(results):
            yield Node(name=result.name, op="python::getitem", args=[name, place], meta=result.meta)

    def _part(self, index: int, path: str, taken: set[int], returned: set[int], inputs: dict[int, Argument]) -> _Part:
        """Return what the original did in call `index`."""
        call = self._graph.calls[index]
        before = dict(self._names)
        # Inside, what the call takes has the name that the original's nodes know it by.
        arguments = {i: value for i in taken if isinstance(value := call.values[i], str)}
        for value in arguments.values():
            self._names.pop(value, None)
        nodes = self.nodes(call.begin, call.end, index)
        outputs = {i: self.renamed(call.values[i]) for i in returned}
        self._names = before
        made = {node.name for node in nodes}
        needed = list(dict.fromkeys(n for node in nodes for n in _operands(node)))
        needed += [value for value in outputs.values() if isinstance(value, str)]
        outside = [n for n in dict.fromkeys(needed) if n not in made and n not in arguments.values()]
        own = {name: alias for name in outside if (alias := self._own(name, path)) is not None}
        captured = [name for name in outside if name not in own]
        metas = {i: self._metas[value] for i, value in arguments.items()}
        graph = msgspec.structs.replace(self._graph, nodes=tuple(nodes), outputs=[*outputs.values()], calls=())
        return _Part(path, call, arguments, captured, own, metas, graph, outputs, inputs)

    def _own(self, name: str, path: str) -> str | None:
        """Return the name below `path` of a state tensor that a graph input is; None: it is no state of that module."""
        prefix = f"{path}."
        names = self._state.get(name, ())
        return next((alias.removeprefix(prefix) for alias in names if alias.startswith(prefix)), None)

    def _results(self, call: ModuleCall, change: Change, returned: set[int]) -> list[_Result]:
        """Return the values that others use of what a call returns; values that it passes on get new names."""
        inside = range(call.begin, call.end)
        by_name = {value: i for i in sorted(returned) if isinstance(value := call.values[i], str)}
        results: list[_Result] = []
        for index in inside:
            node = self._graph.nodes[index]
            if node.name not in by_name and any(use not in inside for use in self._uses.get(node.name, ())):
                raise self._refused(change, f"the program uses `{node.name}` of it, which it does not return")
        for value, i in by_name.items():
            later = [use for use in self._uses.get(value, ()) if use >= call.end]
            if not later:
                continue
            made_inside = self._made.get(value, -1) in inside
            same_as = self._changed_in_place(value, inside) if made_inside else value
            results.append(
                _Result(
                    name=value if made_inside else f"{value} of {CALL} {len(self._callables)}",
                    leaf=i,
                    meta=self._metas[value],
                    is_computed_with=any(use < len(self._graph.nodes) for use in later),
                    # Who uses the result, and who what it was made of in place, cannot be told apart.
                    must_be=same_as if same_as is not None and len(later) > 1 else None,
                )
            )
            if not made_inside:
                self._names[value] = results[-1].name
        return results

    def _changed_in_place(self, value: str, inside: range) -> str | None:
        """Return the value from outside that `value` is the very tensor of, changed in place; None: it is its own."""
        while self._made.get(value, -1) in inside:
            node = self._graph.nodes[self._made[value]]
            if not _writes_in_place(node.op) or not node.args or not isinstance(node.args[0], str):
                return None
            value = node.args[0]
        return value

    def _refused(self, change: Change, reason: str) -> CannotFollow:
        return CannotFollow(
            change.path,
            f"`{change.path}` {change.how}, and no call can follow: {reason}. Change the model, and export it again",
        )


@dataclass(frozen=True, kw_only=True)
class _Result:
    """A value that others use of what a call returns.

    Attributes:
        name: of the value.
        leaf: index among the values of the call.
        meta: what it was at capture.
        is_computed_with: whether nodes use it; otherwise the program returns it alone.
        must_be: value that it must be the very tensor of; None: it may be any.
    """

    name: str
    leaf: int
    meta: ValueMeta
    is_computed_with: bool
    must_be: str | None


@dataclass
class _Part:
    """What the original did in a call: a graph over what it took, what it found around it, and its own state.

    Attributes:
        path: path of the submodule.
        call: the call.
        arguments: values of the graph that it takes, by leaf.
        captured: values that it finds around it.
        own: name below the submodule of each graph input that is its own state.
        metas: what the values that it takes were at capture, by leaf.
        graph: its nodes; outputs in the order of `outputs`.
        outputs: what it returns, by leaf.
        inputs: what the call takes, by leaf.
        function: the graph, compiled at its first run.
    """

    path: str
    call: ModuleCall
    arguments: Mapping[int, str]
    captured: Sequence[str]
    own: Mapping[str, str]
    metas: Mapping[int, ValueMeta]
    graph: Graph
    outputs: Mapping[int, Argument]
    inputs: Mapping[int, Argument]
    function: Function | None = None

    def bound(
        self, module: nn.Module, captured: Sequence[Any], symbols: dict[str, int], environment: Environment
    ) -> Callable[..., Any]:
        """Return what does this part of a running call.

        Args:
            module: whose state it reads.
            captured: what it finds around it.
            symbols: value per symbol.
            environment: see `compile_graph`.
        """
        constant = _constants(environment)
        assert self.call.arguments is not None
        assert self.call.result is not None
        signature = _signature(self.call.arguments, constant)
        result = builder(self.call.result, constant)

        def run(*args: Any, **kwargs: Any) -> Any:
            leaves: list[Any] = [None] * len(self.call.values)
            violations = signature.flatten(args, kwargs, leaves)
            violations += [
                violation
                for i, value in self.arguments.items()
                if (violation := _why_not(leaves[i], self.metas[i], value, symbols)) is not None
            ]
            for i, value in self.inputs.items():
                if isinstance(value, SizeArgument) and leaves[i] != sizes.evaluate(value.value, symbols):
                    violations.append(f"{leaves[i]} in the place of the size {sizes.evaluate(value.value, symbols)}")
            if violations:
                raise NotSupported(
                    f"`{self.path}` got other arguments by a hook than it takes in this program, which is not right "
                    "for them:\n" + "\n".join(f"  - {violation}" for violation in violations)
                )
            if self.function is None:
                names = [*self.arguments.values(), *self.captured, *self.own]
                self.function = compile_graph(self.graph, self.graph.nodes, names, self.graph.outputs, environment)
            state = [_tensor(module, self.path, leaf, self._meta(name)) for name, leaf in self.own.items()]
            values = self.function([*(leaves[i] for i in self.arguments), *captured, *state], symbols)
            for i, value in zip(self.outputs, values, strict=True):
                leaves[i] = value
            return result(leaves)

        return run

    def _meta(self, name: str) -> ValueMeta:
        return next(value.meta for value in self.graph.inputs if value.name == name)


class SubmoduleCall:
    """Calls the module that stands in the place of a submodule."""

    def __init__(
        self,
        path: str,
        change: Change,
        call: ModuleCall,
        inputs: Mapping[int, Argument],
        results: Sequence[_Result],
        part: _Part | None,
        environment: Environment,
    ) -> None:
        """Prepare one call.

        Args:
            path: path of the submodule.
            change: what changed, with the module that stands there.
            call: what the original took and returned.
            inputs: what it takes now, per leaf.
            results: what others use of what it returns.
            part: what the original did; None: the module does what its class does.
            environment: of the program.
        """
        assert change.module is not None
        assert call.arguments is not None
        assert call.result is not None
        self._path = path
        self._how = change.how
        self._module = change.module
        self._call = call
        self._inputs = inputs
        self._names = [value for value in inputs.values() if isinstance(value, str)]
        self._results = results
        self._part = part
        self._environment = environment
        constant = _constants(environment)
        self._build = builder(call.arguments, constant)
        self._flatten = Signature(
            (Parameter(name="result", kind="positional_only", tree=call.result),), constant
        ).flatten

    def __call__(self, symbols: dict[str, int], values: Sequence[Any], captured: Sequence[Any]) -> list[Any]:
        """Return the values that others use of what the module returns.

        Args:
            symbols: value per symbol.
            values: tensors that it takes.
            captured: what the part finds around it.

        Raises:
            NotSupported: the module returns what the rest of the program is not right for.
        """
        leaves: list[Any] = [None] * len(self._call.values)
        by_name = dict(zip(self._names, values, strict=True))
        for i, value in self._inputs.items():
            leaves[i] = by_name[value] if isinstance(value, str) else _constant_of(value, symbols, self._environment)
        args, kwargs = self._build(leaves)
        if self._part is None:
            returned = self._module(*args, **kwargs)
        else:
            run = self._part.bound(self._module, captured, symbols, self._environment)
            with running(self._module, run):
                returned = self._module(*args, **kwargs)
        found: list[Any] = [None] * len(self._call.values)
        violations = self._flatten((returned,), {}, found)
        for result in self._results if not violations else ():
            violation = self._violation(result, found[result.leaf], by_name, symbols)
            violations += [] if violation is None else [violation]
        if violations:
            raise NotSupported(
                f"`{self._path}` {self._how}, and now returns what the rest of the program is not right for. Return "
                "what the original did, or change the model and export it again:\n"
                + "\n".join(f"  - {violation}" for violation in violations)
            )
        return [found[result.leaf] for result in self._results]

    def _violation(self, result: _Result, value: Any, taken: Mapping[str, Any], symbols: dict[str, int]) -> str | None:
        if result.must_be is not None and value is not taken.get(result.must_be):
            return (
                "the original returned the very tensor that it got, and what the program computes with the one cannot "
                "be told apart from what it computes with the other"
            )
        return _why_not(value, result.meta, "result", symbols) if result.is_computed_with else None


def _constants(environment: Environment) -> Callable[[Constant], Any]:
    return lambda leaf: constant_value(leaf.value, environment)


def _constant_of(value: Argument, symbols: dict[str, int], environment: Environment) -> Any:
    if isinstance(value, SizeArgument):
        return sizes.evaluate(value.value, symbols)
    return constant_value(value, environment)


def _signature(arguments: Tree, constant: Callable[[Constant], Any]) -> Signature:
    """Return what takes apart the positional and keyword arguments of a call."""
    assert isinstance(arguments, SequenceTree)
    args, kwargs = arguments.items
    return Signature(
        (
            Parameter(name="args", kind="var_positional", tree=args),
            Parameter(name="kwargs", kind="var_keyword", tree=kwargs),
        ),
        constant,
    )


def _why_not(value: Any, meta: ValueMeta, what: str, symbols: dict[str, int]) -> str | None:
    """Return why `value` is not what a graph computes with; None: it is."""
    if not isinstance(meta, TensorMeta):
        return None
    if not isinstance(value, torch.Tensor):
        return f"`{what}`: expected a tensor, got {type(value).__name__}"
    shape = tuple(_size(size, symbols) for size in meta.shape)
    fits = len(shape) == value.dim() and all(
        known is None or known == size for known, size in zip(shape, value.shape, strict=True)
    )
    if fits and dtypes.name_of(value.dtype) == meta.dtype:
        return None
    listed = ", ".join("?" if size is None else str(size) for size in shape)
    return f"`{what}`: expected {meta.dtype}[{listed}], got {dtypes.name_of(value.dtype)}{list(value.shape)}"


def _size(size: Any, symbols: dict[str, int]) -> int | None:
    try:
        return None if size is None else sizes.evaluate(size, symbols)
    except (KeyError, *sizes.UNDEFINED):
        # A size that only the data know.
        return None


def _tensor(module: nn.Module, path: str, leaf: str, meta: ValueMeta) -> Any:
    """Return the tensor at `leaf` below a module, as it is now; one that is computed, computed."""
    *below, name = leaf.split(".")
    owner = module
    for part in below:
        owner = owner._modules[part]
        assert owner is not None
    value = owner._parameters.get(name, owner._buffers.get(name))
    value = getattr(owner, name, None) if value is None else value
    if (violation := _why_not(value, meta, f"{path}.{leaf}", {})) is not None:
        raise NotSupported(
            f"the program is not right for the module's tensors as they are now. {violation}. Replace the whole "
            "submodule by one of your own, or change the model and export it again"
        )
    return value


def _leaves(tree: Tree) -> set[int]:
    return {leaf.index for _, leaf in leaves(tree) if isinstance(leaf, Leaf)}


def _writes_in_place(op: str) -> bool:
    """Return whether an operator changes its first argument, and returns it."""
    return op.startswith("aten::") and op.partition(".")[0].endswith("_")


def _operands(node: Node) -> Iterable[str]:
    return [name for argument in (*node.args, *node.kwargs.values()) for name in references(argument)]


__all__ = ["CALL", "CannotFollow", "LiveGraph", "SubmoduleCall", "live_graph"]
