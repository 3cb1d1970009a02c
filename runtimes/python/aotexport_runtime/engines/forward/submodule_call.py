"""One call of the module in the place of a submodule, and the original's part in it."""

# The tables of a module have no public names.
# pyright: reportPrivateUsage=false

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from aotexport_runtime.errors import NotSupported
from aotexport_runtime.execution.codegen import Environment, Function, compile_graph, constant_value
from aotexport_runtime.guards.signature import Signature
from aotexport_runtime.schema.graph import Graph, ModuleCall
from aotexport_runtime.schema.program import Parameter
from aotexport_runtime.schema.trees import Constant, Leaf, Tree
from aotexport_runtime.schema.trees import Sequence as SequenceTree
from aotexport_runtime.schema.values import Argument, SizeArgument, TensorMeta, ValueMeta
from aotexport_runtime.submodules.changes import SubmoduleChange
from aotexport_runtime.submodules.submodule import running
from aotexport_runtime.values import dtypes, sizes
from aotexport_runtime.values.trees import builder, leaves

Need = Literal["shape", "rank", "nothing"]
"""The properties of a value that must be as at capture: `shape` and dtype, where nodes that use it may hold one of its
sizes; `rank` and dtype, where those nodes do the same for all sizes; `nothing`, where it is only returned."""


@dataclass(frozen=True, kw_only=True)
class Result:
    """A result of a call that later nodes use.

    Attributes:
        name: name of the value.
        leaf: index among the values of the call.
        meta: metadata at capture.
        needs: the properties that must be as at capture.
        must_be: name of the value whose very tensor it must be; None: any tensor will do.
    """

    name: str
    leaf: int
    meta: ValueMeta
    needs: Need
    must_be: str | None


@dataclass(frozen=True, kw_only=True)
class Part:
    """The original's part in a call: a graph over its arguments, captured values, and the submodule's state.

    Attributes:
        arguments: names of the graph's values that it takes, by leaf of the call.
        captured: names of values from around the call that it uses.
        own: name below the submodule of each graph input that is its own state.
        metas: metadata of the graph's inputs.
        graph: its nodes; outputs in the order of `outputs`.
        outputs: its results, by leaf of the call.
    """

    arguments: Mapping[int, str]
    captured: Sequence[str]
    own: Mapping[str, str]
    metas: Mapping[str, ValueMeta]
    graph: Graph
    outputs: Sequence[int]


class SubmoduleCall:
    """Calls the module in the place of a submodule."""

    def __init__(
        self,
        change: SubmoduleChange,
        call: ModuleCall,
        inputs: Mapping[int, Argument],
        results: Sequence[Result],
        part: Part | None,
        environment: Environment,
    ) -> None:
        """Prepare one call of the module that `change` has put in.

        `inputs` has its arguments per leaf of the captured `call`. Without a `part` of the original's the module runs
        its own code.
        """
        assert change.module is not None
        assert isinstance(call.arguments, SequenceTree)
        assert call.result is not None
        self._change, self._module = change, change.module
        self._count = len(call.values)
        self._inputs = inputs
        self._names = [value for value in inputs.values() if isinstance(value, str)]
        self._results = results
        self._part = part
        self._environment = environment
        self._function: Function | None = None

        def constant(leaf: Constant) -> Any:
            return constant_value(leaf.value, environment)

        args, kwargs = call.arguments.items
        takes = (
            Parameter(name="args", kind="var_positional", tree=args),
            Parameter(name="kwargs", kind="var_keyword", tree=kwargs),
        )
        self._flatten_arguments = Signature(takes, constant).flatten
        self._build_arguments = builder(call.arguments, constant)
        gives = (Parameter(name="result", kind="positional_only", tree=call.result),)
        self._flatten_result = Signature(gives, constant).flatten
        self._build_result = builder(call.result, constant)

    def __call__(self, symbols: dict[str, int], values: Sequence[Any], captured: Sequence[Any]) -> list[Any]:
        """Call the module with `values`, its tensors; return the results that later nodes use.

        Raises:
            NotSupported: the rest of the program is not right for the module's results.
        """
        leaves: list[Any] = [None] * self._count
        by_name = dict(zip(self._names, values, strict=True))
        for i, value in self._inputs.items():
            leaves[i] = by_name[value] if isinstance(value, str) else self._constant(value, symbols)
        args, kwargs = self._build_arguments(leaves)
        if self._part is None:
            returned = self._module(*args, **kwargs)
        else:
            with running(self._module, functools.partial(self._run, self._part, captured, symbols)):
                returned = self._module(*args, **kwargs)
        found: list[Any] = [None] * self._count
        violations = self._flatten_result((returned,), {}, found)
        for result in self._results if not violations else ():
            violation = self._violation(result, found[result.leaf], by_name, symbols)
            violations += [] if violation is None else [violation]
        if violations:
            raise NotSupported(
                f"`{self._change.path}` {self._change.how}, and now returns what the rest of the program is not right "
                "for. Return what the original did, or change the model and export it again:\n"
                + "\n".join(f"  - {violation}" for violation in violations)
            )
        return [found[result.leaf] for result in self._results]

    def _constant(self, value: Argument, symbols: dict[str, int]) -> Any:
        if isinstance(value, SizeArgument):
            return sizes.evaluate(value.value, symbols)
        return constant_value(value, self._environment)

    def _violation(self, result: Result, value: Any, taken: Mapping[str, Any], symbols: dict[str, int]) -> str | None:
        if result.must_be is not None and value is not taken.get(result.must_be):
            return (
                "the original returned the very tensor that it got, and what the program computes with the one cannot "
                "be told apart from what it computes with the other"
            )
        if result.needs == "nothing":
            return None
        return _why_not(value, result.meta, "result", symbols, any_size=result.needs == "rank")

    def _run(self, part: Part, captured: Sequence[Any], symbols: dict[str, int], *args: Any, **kwargs: Any) -> Any:
        """Run the original's part; hooks may have put other arguments in place of those of the call."""
        leaves: list[Any] = [None] * self._count
        violations = self._flatten_arguments(args, kwargs, leaves)
        for i, name in part.arguments.items():
            violation = _why_not(leaves[i], part.metas[name], name, symbols)
            violations += [] if violation is None else [violation]
        for i, value in self._inputs.items():
            if isinstance(value, SizeArgument) and leaves[i] != (size := sizes.evaluate(value.value, symbols)):
                violations.append(f"{leaves[i]} in the place of the size {size}")
        if violations:
            raise NotSupported(
                f"`{self._change.path}` got other arguments by a hook than it takes in this program, which is not "
                "right for them:\n" + "\n".join(f"  - {violation}" for violation in violations)
            )
        if self._function is None:
            names = [*part.arguments.values(), *part.captured, *part.own]
            self._function = compile_graph(part.graph, part.graph.nodes, names, part.graph.outputs, self._environment)
        state = [_tensor(self._module, self._change.path, leaf, part.metas[name]) for name, leaf in part.own.items()]
        values = self._function([*(leaves[i] for i in part.arguments), *captured, *state], symbols)
        for i, value in zip(part.outputs, values, strict=True):
            leaves[i] = value
        return self._build_result(leaves)


def _why_not(value: Any, meta: ValueMeta, what: str, symbols: dict[str, int], *, any_size: bool = False) -> str | None:
    """Return why a graph cannot take `value`; None: it can."""
    if not isinstance(meta, TensorMeta):
        return None
    if not isinstance(value, torch.Tensor):
        return f"`{what}`: expected a tensor, got {type(value).__name__}"
    shape = tuple(None if any_size else _size(size, symbols) for size in meta.shape)
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
        # The size depends on data.
        return None


def _tensor(module: nn.Module, path: str, leaf: str, meta: ValueMeta) -> Any:
    """Return the current tensor at `leaf` below a module, which may compute it."""
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


def leaves_of(tree: Tree) -> set[int]:
    """Return the indices of a tree's leaves."""
    return {leaf.index for _, leaf in leaves(tree) if isinstance(leaf, Leaf)}


def without_values(call: ModuleCall, *, returned: bool) -> bool:
    """Return whether the graph lacks a part of a call's arguments or, with `returned`, of its result."""
    trees = (call.arguments, call.result) if returned else (call.arguments,)
    return any(call.values[index] is None for tree in trees if tree is not None for index in leaves_of(tree))
