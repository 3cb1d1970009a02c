"""One call of the module in the place of a submodule, and the original's part in it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from aotexport_runtime.errors import NotSupported
from aotexport_runtime.execution.codegen import Environment, Function, constant_value
from aotexport_runtime.guards.signature import Signature
from aotexport_runtime.schema.graph import ModuleCall
from aotexport_runtime.schema.program import Parameter
from aotexport_runtime.schema.sizes import Size
from aotexport_runtime.schema.trees import Constant, Leaf, Tree
from aotexport_runtime.schema.trees import Sequence as SequenceTree
from aotexport_runtime.schema.values import Argument, SizeArgument, TensorMeta, ValueMeta
from aotexport_runtime.submodules.changes import SubmoduleChange
from aotexport_runtime.submodules.submodule import running
from aotexport_runtime.submodules.tables import slot_of
from aotexport_runtime.values import dtypes, sizes
from aotexport_runtime.values.trees import builder, leaves

Need = Literal["shape", "rank", "nothing"]
"""The properties of a value that must be as at capture: `shape` and dtype, where nodes that use it may hold one of its
sizes; `rank` and dtype, where those nodes do the same for all sizes; `nothing`, where it is only returned."""


@dataclass(frozen=True, kw_only=True)
class Result:
    """A result of a call that later nodes use: its index among the values of the call, its metadata at capture.

    `must_be`: name of the value whose very tensor it must be; None: any tensor will do.
    """

    name: str
    leaf: int
    meta: ValueMeta
    needs: Need
    must_be: str | None


@dataclass(frozen=True, kw_only=True)
class Part:
    """The original's part in a call, as a function of arguments, of captured values, and of the submodule's state.

    Attributes:
        arguments: names of its values that are arguments, by leaf of the call.
        captured: names of values from around the call.
        own: name below the submodule of each value that is its state.
        outputs: its results, by leaf of the call.
        compiled: returns the function.
    """

    arguments: Mapping[int, str]
    captured: Sequence[str]
    own: Mapping[str, str]
    metas: Mapping[str, ValueMeta]
    outputs: Sequence[int]
    compiled: Callable[[], Function]


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
        """Prepare one call of the module that `change` has put in, with `inputs` per leaf of the captured `call`.

        Without a `part` of the original's the module runs its own code.
        """
        assert change.module is not None
        assert isinstance(call.arguments, SequenceTree)
        assert call.result is not None
        self._change, self._module, self._original = change, change.module, change.wrapped or change.module
        self._count = len(call.values)
        self._inputs = inputs
        self._names = [value for value in inputs.values() if isinstance(value, str)]
        self._results = results
        self._part = part
        self._value_of = functools.partial(constant_value, environment=environment)
        args, kwargs = call.arguments.items
        parameters = (
            Parameter(name="args", kind="var_positional", tree=args),
            Parameter(name="kwargs", kind="var_keyword", tree=kwargs),
        )

        def constant(leaf: Constant) -> Any:
            return self._value_of(leaf.value)

        self._arguments = Signature(parameters, constant)
        self._result = Signature((Parameter(name="result", kind="positional_only", tree=call.result),), constant)
        self._build_arguments = builder(call.arguments, constant)
        self._build_result = builder(call.result, constant)

    def __call__(self, symbols: dict[str, int], values: Sequence[Any], captured: Sequence[Any]) -> list[Any]:
        """Call the module with `values`, its tensors; return the results that later nodes use.

        Raises:
            NotSupported: the rest of the program is not right for the module's results.
        """
        given, by_name = [None] * self._count, dict(zip(self._names, values, strict=True))
        for i, value in self._inputs.items():
            given[i] = by_name[value] if isinstance(value, str) else self._constant(value, symbols)
        args, kwargs = self._build_arguments(given)
        # The original's own results; under autocast they have other dtypes than at capture.
        made: list[Any] = []

        def run(part: Part, /, *args: Any, **kwargs: Any) -> Any:
            made.append(self._run(part, captured, symbols, given, args, kwargs))
            return made[-1]

        if self._part is None:
            returned = self._module(*args, **kwargs)
        else:
            with running(self._original, functools.partial(run, self._part)):
                returned = self._module(*args, **kwargs)
        is_made = any(returned is each for each in made)
        found: list[Any] = [None] * self._count
        violations = self._result.flatten((returned,), {}, found)
        for result in self._results if not violations else ():
            value = found[result.leaf]
            if result.must_be is not None and value is not by_name.get(result.must_be):
                violations.append(
                    "the original returned the very tensor that it got, and what the program computes with the one "
                    "cannot be told apart from what it computes with the other"
                )
            elif result.needs != "nothing" and not is_made:
                violations += _faults(value, result.meta, "result", symbols, any_size=result.needs == "rank")
        self._refuse(
            f"{self._change.how}, and now returns what the rest of the program is not right for. Return what the "
            "original did, or change the model and export it again",
            violations,
        )
        return [found[result.leaf] for result in self._results]

    def _constant(self, value: Argument, symbols: dict[str, int]) -> Any:
        return sizes.evaluate(value.value, symbols) if isinstance(value, SizeArgument) else self._value_of(value)

    def _refuse(self, what: str, violations: list[str]) -> None:
        if violations:
            listed = "\n".join(f"  - {violation}" for violation in violations)
            raise NotSupported(f"`{self._change.path}` {what}:\n{listed}")

    def _run(
        self,
        part: Part,
        captured: Sequence[Any],
        symbols: dict[str, int],
        given: Sequence[Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Run the original's part; hooks may have put other arguments in place of those `given` to the call."""
        values: list[Any] = [None] * self._count
        violations = self._arguments.flatten(args, kwargs, values)
        for i, name in part.arguments.items():
            violations += _faults(values[i], part.metas[name], name, symbols) if values[i] is not given[i] else []
        for i, value in self._inputs.items():
            if isinstance(value, SizeArgument) and values[i] != (size := sizes.evaluate(value.value, symbols)):
                violations.append(f"{values[i]} in the place of the size {size}")
        self._refuse(
            "got other arguments by a hook than it takes in this program, which is not right for them", violations
        )
        state = [self._tensor(leaf, part.metas[name]) for name, leaf in part.own.items()]
        results = part.compiled()([*(values[i] for i in part.arguments), *captured, *state], symbols)
        for i, value in zip(part.outputs, results, strict=True):
            values[i] = value
        return self._build_result(values)

    def _tensor(self, name: str, meta: ValueMeta) -> Any:
        """Return the current tensor of a name below the module, which may compute it."""
        slot = slot_of(self._original, name)
        value = None if slot is None else slot[0].get(slot[1])
        for fault in _faults(value, meta, f"{self._change.path}.{name}", {}):
            raise NotSupported(
                f"the program is not right for the module's tensors as they are now. {fault}. Replace the whole "
                "submodule by one of your own, or change the model and export it again"
            )
        return value


def _faults(value: Any, meta: ValueMeta, what: str, symbols: dict[str, int], *, any_size: bool = False) -> list[str]:
    """Return why a graph cannot take `value`; empty: it can."""
    if not isinstance(meta, TensorMeta):
        return []
    if not isinstance(value, torch.Tensor):
        return [f"`{what}`: expected a tensor, got {type(value).__name__}"]
    shape = [None if any_size else _size(size, symbols) for size in meta.shape]
    fits = len(shape) == value.dim() and all(
        known in (None, size) for known, size in zip(shape, value.shape, strict=True)
    )
    if fits and dtypes.name_of(value.dtype) == meta.dtype:
        return []
    listed = ", ".join("?" if size is None else str(size) for size in shape)
    return [f"`{what}`: expected {meta.dtype}[{listed}], got {dtypes.name_of(value.dtype)}{list(value.shape)}"]


def _size(size: Size, symbols: dict[str, int]) -> int | None:
    """Return a size; None: it depends on data."""
    try:
        return sizes.evaluate(size, symbols)
    except (KeyError, *sizes.UNDEFINED):
        return None


def leaves_of(tree: Tree) -> set[int]:
    """Return the indices of a tree's leaves."""
    return {leaf.index for _, leaf in leaves(tree) if isinstance(leaf, Leaf)}


def without_values(call: ModuleCall, *, returned: bool) -> bool:
    """Return whether the graph lacks a part of a call's arguments or, with `returned`, of its result."""
    trees = (call.arguments, call.result) if returned else (call.arguments,)
    return any(call.values[index] is None for tree in trees if tree is not None for index in leaves_of(tree))
