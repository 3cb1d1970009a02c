"""One call of the module in the place of a submodule, and the original's part in it."""

# The tables of a module have no public names.
# pyright: reportPrivateUsage=false

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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


@dataclass
class Part:
    """The original's part in a call: a graph over its arguments, captured values, and the submodule's state.

    Attributes:
        path: path of the submodule.
        call: the call.
        arguments: names of the graph's values that it takes, by leaf.
        captured: names of values from around the call that it uses.
        own: name below the submodule of each graph input that is its own state.
        metas: metadata of the arguments at capture, by leaf.
        graph: its nodes; outputs in the order of `outputs`.
        outputs: its results, by leaf.
        inputs: arguments of the call, by leaf.
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
        """Return a function that runs the part within a call.

        Args:
            module: the module whose state it reads.
            captured: the values of `captured`.
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
    """Calls the module in the place of a submodule."""

    def __init__(
        self,
        path: str,
        change: SubmoduleChange,
        call: ModuleCall,
        inputs: Mapping[int, Argument],
        results: Sequence[Result],
        part: Part | None,
        environment: Environment,
    ) -> None:
        """Prepare one call.

        Args:
            path: path of the submodule.
            change: the change, with the current module.
            call: the captured call of the original.
            inputs: arguments of the call, per leaf.
            results: results that later nodes use.
            part: the original's part; None: the module runs its own code.
            environment: environment of the program.
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
        """Call the module; return the results that later nodes use.

        Args:
            symbols: value per symbol.
            values: tensors that the call takes.
            captured: values that the part captures.

        Raises:
            NotSupported: the rest of the program is not right for the module's results.
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

    def _violation(self, result: Result, value: Any, taken: Mapping[str, Any], symbols: dict[str, int]) -> str | None:
        if result.must_be is not None and value is not taken.get(result.must_be):
            return (
                "the original returned the very tensor that it got, and what the program computes with the one cannot "
                "be told apart from what it computes with the other"
            )
        if result.needs == "nothing":
            return None
        return _why_not(value, result.meta, "result", symbols, any_size=result.needs == "rank")


def _constants(environment: Environment) -> Callable[[Constant], Any]:
    return lambda leaf: constant_value(leaf.value, environment)


def _constant_of(value: Argument, symbols: dict[str, int], environment: Environment) -> Any:
    if isinstance(value, SizeArgument):
        return sizes.evaluate(value.value, symbols)
    return constant_value(value, environment)


def _signature(arguments: Tree, constant: Callable[[Constant], Any]) -> Signature:
    """Return the signature that flattens the positional and keyword arguments of a call."""
    assert isinstance(arguments, SequenceTree)
    args, kwargs = arguments.items
    return Signature(
        (
            Parameter(name="args", kind="var_positional", tree=args),
            Parameter(name="kwargs", kind="var_keyword", tree=kwargs),
        ),
        constant,
    )


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
