"""The joint graph, partitioned into forward and backward and compiled for the gradients that a call needs."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from functools import cached_property
from typing import Any

import torch

from aotexport_runtime.engines.candidates import PORTABLE
from aotexport_runtime.engines.engine import Native
from aotexport_runtime.engines.functional.epilogue import OpaqueTensor
from aotexport_runtime.engines.functional.tangents import (
    InnerOutput,
    flowless_outputs,
    layout,
    positions_of_tangents,
    zeros,
)
from aotexport_runtime.engines.runs import LIBRARY_FAILED, Engines
from aotexport_runtime.execution.codegen import Environment, Function
from aotexport_runtime.execution.functional_graph import compile_functional
from aotexport_runtime.rewrite import partition as partitions
from aotexport_runtime.rewrite.names import impure_nodes, random_nodes
from aotexport_runtime.schema.graph import Graph
from aotexport_runtime.schema.program import FreshOutput, FunctionalGraph
from aotexport_runtime.schema.values import SizeMeta, TensorMeta
from aotexport_runtime.values import sizes

Pattern = tuple[bool, ...]
"""Which gradients are needed, or which tangents are defined."""

Reference = Callable[[list[Any], dict[str, int]], Sequence[Any]]
"""`(inputs of the joint graph, value per symbol) -> outputs`, by the forward graph under autograd."""


class JointProgram:
    """A joint graph, compiled per pattern of needed gradients on first use.

    Attributes:
        reference: for double backward; None: there is none.
        inner: outputs that others are computed from.
        steady: tensor inputs that a call mutates by the epilogue, or whose version it leaves as it is.
        plain: tensor inputs that are no `nn.Parameter`s.
        is_sized_by_data: whether tangents have sizes that depend on the data of a call.
        native: the graph as native code, for calls that want every gradient; None: generated code runs.
        checks: whether backward checks versions or hooks.
        found: results of `compiled` per pattern of needed gradients.
    """

    def __init__(
        self,
        graph: Graph,
        functional: FunctionalGraph,
        environment: Environment,
        engines: Engines,
        reference: Reference | None,
        parameters: Container[int],
        inner: Sequence[InnerOutput],
        native: Native | None,
    ) -> None:
        """Prepare the joint `graph`, of whose inputs `parameters` are `nn.Parameter`s; `engines` records passes."""
        assert functional.gradients is not None
        self.graph = graph
        self.functional = functional
        self.gradients = functional.gradients
        self.environment = environment
        self.engines = engines
        self.native = native
        self.inner = inner
        self.checks = bool(inner or self.gradients.checks)
        self.impure = impure_nodes(graph)
        self.draws = bool(random_nodes(graph))
        # The reference runs on copies of mutated inputs, which is wrong where gradients flow through a mutation.
        copied = all(m.data and not (m.metadata or m.storage or m.requires_grad) for m in functional.mutations)
        self.reference = reference if copied else None
        self.mutated = [mutation.input_index for mutation in functional.mutations]
        inputs = range(len(self.gradients.of_inputs))
        tensors = [i for i in inputs if isinstance(graph.inputs[i].meta, TensorMeta)]
        self.plain = [i for i in tensors if i not in parameters]
        risen = {rise.input_index for rise in functional.version_rises} - set(self.mutated)
        self.steady = [i for i in tensors if i not in risen]
        sizes_of_inputs = {size for value in graph.inputs[: len(inputs)] for size in _symbols(value.meta)}
        self.is_sized_by_data = any(_symbols(tangent.meta) - sizes_of_inputs for tangent in self.gradients.tangents)
        self.found: dict[Pattern, CompiledJoint] = {}

    def compiled(self, needed: Pattern, symbols: dict[str, int]) -> CompiledJoint:
        """Return forward and backward for the needed gradients of `apply_joint`'s arguments, kept in `found`."""
        found = self.found[needed] = CompiledJoint(self, needed[2:], symbols)
        self.engines.ran("forward", found.engine)
        return found


class CompiledJoint:
    """A compiled forward and backward, with the facts about their values that the `autograd.Function` needs.

    Attributes:
        saves_its_own: whether native code saves values of its own choice.
        forward: returns `returns` results, then saved values.
        checked: slice of the saved tensors whose versions autograd checks.
        unchecked: slice of the saved tensors whose versions it does not check; None: there are none.
        loose: slice of values saved without autograd, which does not free them; None: there are none.
        opaque: results that autograd must not see: aliases, and tensors whose metadata or storage changes.
        views: results that are views which nobody may change.
        checks: further tensors whose versions are checked, as eager checks its saved tensors: whether it is an input or
            an output, its index, and the results of the forward whose gradients make eager read it.
        saves_nothing: whether no tensors are saved for backward, neither here nor in eager.
        needs_zeros: whether its backward takes every tangent, zeros where one is undefined.
        tangents: per tangent the position of its result, and a function that lays it out.
    """

    def __init__(self, joint: JointProgram, needed: Pattern, symbols: dict[str, int]) -> None:
        """Partition and compile `joint` for these gradients; `symbols` are those of the first such call."""
        functional, gradients, native = joint.functional, joint.gradients, joint.native
        self.joint = joint
        self.saves_its_own = native is not None and native.saved is not None
        self.engine = PORTABLE if native is None else native.target
        self._partitioned = partitioned = _partitioned(joint, needed, symbols)
        self.returns = returns = partitions.forward_returns(functional)
        self.forward = _forward(joint, partitioned, returns)
        checked, unchecked, loose = partitioned.saved_tensors, partitioned.saved_unchecked, partitioned.saved_others
        if native is not None and native.saved is not None:
            checked, unchecked, loose = native.saved, 0, 0
        elif gradients.saves_nothing:
            # Autograd must not free anything either.
            unchecked, loose = 0, unchecked + loose
        self.checked = slice(returns, returns + checked)
        start, end = returns + checked, returns + checked + unchecked
        self.unchecked = slice(start, end) if unchecked else None
        self.loose = slice(end, end + loose) if loose else None
        mutations, positions = len(functional.mutations), positions_of_tangents(functional)
        reached = {position for position, reaches in zip(positions, partitioned.reaching, strict=True) if reaches}
        flowless = {mutations + index for index in flowless_outputs(functional)}
        outputs = list(enumerate(functional.outputs, mutations))
        self.opaque = [index for index, mutation in enumerate(functional.mutations) if not mutation.data]
        self.opaque += [index for index, output in outputs if not isinstance(output, FreshOutput)]
        # Views that autograd lets nobody change.
        self.views = [i for i, o in outputs if isinstance(o, FreshOutput) and o.view in _PROTECTED]
        wants_all = all(wants or index is None for index, wants in zip(gradients.of_inputs, needed, strict=True))
        self.checks = _checks(joint, positions, None if wants_all else partitioned)
        self.nondifferentiable = [i for i in range(returns) if i not in {*reached, *self.opaque, *flowless}]
        self.tangents = [(position, layout(spec)) for position, spec in zip(positions, gradients.tangents, strict=True)]
        self.has_marks = bool(self.opaque or self.views or self.nondifferentiable or joint.is_sized_by_data)
        self.saves_nothing = gradients.saves_nothing and checked == 0
        self.needs_zeros = self.saves_its_own or joint.is_sized_by_data
        self._backwards: dict[tuple[Pattern, bool], Function] = {}

    def marked(self, ctx: Any, results: Sequence[Any]) -> tuple[Any, ...]:
        """Return the results as the `autograd.Function` returns them, and mark those that get no gradient."""
        returned = list(results)
        if self.joint.is_sized_by_data:
            ctx.shapes = [returned[position].shape for position, _ in self.tangents]
        for index in self.opaque:
            returned[index] = OpaqueTensor(returned[index])
        for index in self.views:
            returned[index] = returned[index].view_as(returned[index])
        tensors = [returned[i] for i in self.nondifferentiable if isinstance(returned[i], torch.Tensor)]
        ctx.mark_non_differentiable(*tensors)
        return tuple(returned)

    @cached_property
    def whole_backward(self) -> Function:
        """The compiled backward where every tangent is defined, and none a batch."""
        return self._compile_backward((True,) * len(self.tangents), False)

    def backward(self, args: Sequence[Any], batched: bool) -> Function:
        """Return the compiled backward for saved values and tangents, of which some may be None, or batches."""
        defined = tuple([tangent is not None for tangent in args[len(args) - len(self.tangents) :]])
        found = self._backwards.get((defined, batched))
        if found is None:
            found = self._backwards[defined, batched] = self._compile_backward(defined, batched)
        return found

    def _compile_backward(self, defined: Pattern, batched: bool) -> Function:
        joint, native, whole = self.joint, self.joint.native, self._partitioned.backward
        piece = partitions.with_tangents(joint.graph, whole, defined)
        reason: str | None = "" if native is None else native.why_not_backward(defined)
        if native is not None and batched and not self.saves_its_own:
            reason = "a batch of gradients"

        def portable(because: str = LIBRARY_FAILED) -> Function:
            joint.engines.ran("backward", PORTABLE, because)
            taken, label = (whole if self.needs_zeros else piece), f"{joint.engines.program} backward"
            return compile_functional(joint.graph, taken, joint.environment, label=label, in_place=not batched)

        if native is None or reason is not None:
            compiled = portable(reason or "")
        else:
            joint.engines.ran("backward", self.engine)
            compiled = native.backward_of(piece, portable)
        if all(defined) or not self.needs_zeros:
            return compiled

        def run(args: list[Any], symbols: dict[str, int]) -> tuple[Any, ...]:
            found = zip(piece.outputs, compiled(args, symbols), strict=True)
            return tuple([None if output is None else gradient for output, gradient in found])

        return run

    def fill(self, args: list[Any], symbols: dict[str, int], ctx: Any) -> None:
        """Put zeros in place of undefined tangents into the arguments of backward."""
        specs = self.joint.gradients.tangents
        start = len(args) - len(specs)
        device = next(arg.device for arg in args[start:] if arg is not None)
        for index, spec in enumerate(specs):
            if args[start + index] is None:
                by_data = self.joint.is_sized_by_data
                shape = ctx.shapes[index] if by_data else [sizes.evaluate(s, symbols) for s in spec.meta.shape]
                args[start + index] = zeros(spec, shape, device, symbols)


def _partitioned(joint: JointProgram, needed: Pattern, symbols: dict[str, int]) -> partitions.PartitionedGraph:
    """Return forward and backward of a joint graph, within the memory budget."""
    functional, budget = joint.functional, joint.environment.memory_budget
    partition = None if joint.native is None else joint.native.partition
    if partition is None:
        partition = partitions.views_recomputed(joint.graph, functional, joint.gradients.partitions[0])
    if budget == 1:
        return partitions.partition_graph(joint.graph, functional, partition, needed, joint.impure)
    from aotexport_runtime.rewrite.recompute import computed_late, within_budget

    partition = within_budget(joint.graph, functional, partition, budget, symbols, joint.impure)
    return computed_late(partitions.partition_graph(joint.graph, functional, partition, needed, joint.impure))


def _forward(joint: JointProgram, partitioned: partitions.PartitionedGraph, returns: int) -> Function:
    """Return the compiled forward, whose first `returns` results go to the caller."""

    def portable() -> Function:
        if joint.native is not None:
            joint.engines.ran("forward", PORTABLE, LIBRARY_FAILED)
        label = f"{joint.engines.program} forward"
        return compile_functional(
            joint.graph, partitioned.forward, joint.environment, label=label, visible=returns, detached=True
        )

    return portable() if joint.native is None else joint.native.forward_of(partitioned.forward, portable)


def _checks(
    joint: JointProgram, positions: Sequence[int], partitioned: partitions.PartitionedGraph | None
) -> list[tuple[bool, int, list[int]]]:
    """Return the version checks of a call that wants every gradient, or those of values that `partitioned` saves."""
    graph, mutations = joint.graph, len(joint.functional.mutations)
    saved = None if partitioned is None else {partitions.base_of(graph, name) for name in partitioned.backward.inputs}
    found: list[tuple[bool, int, list[int]]] = []
    for check in joint.gradients.checks:
        value = graph.inputs[check.index].name if check.of == "input" else graph.outputs[mutations + check.index]
        if saved is None or (isinstance(value, str) and partitions.base_of(graph, value) in saved):
            found.append((check.of == "input", check.index, [positions[index] for index in check.tangents]))
    return found


def _symbols(meta: Any) -> set[str]:
    shape = meta.shape if isinstance(meta, TensorMeta) else (meta.value,) if isinstance(meta, SizeMeta) else ()
    return {symbol for size in shape if size is not None for symbol in sizes.symbols_of(size)}


_PROTECTED = ("custom_function", "multi_output")
