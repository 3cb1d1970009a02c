"""Guards of functional graphs: the forward graph, which is as general as the user's code, serves other calls."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from aotexport_runtime.engines.cpu.engine import Libraries
from aotexport_runtime.engines.lowered import Lowered
from aotexport_runtime.engines.onnx.frozen import FrozenModel
from aotexport_runtime.execution import transforms
from aotexport_runtime.execution.autocast import autocast_dtype
from aotexport_runtime.guards.caller import without_autocast
from aotexport_runtime.guards.rule import Call, GuardRule, GuardSource, input_name
from aotexport_runtime.guards.subjects import same_layout, value_of
from aotexport_runtime.rewrite.partition import reached_in_part
from aotexport_runtime.schema.graph import Graph
from aotexport_runtime.schema.program import (
    ArgumentInput,
    FunctionalGraph,
    InputAlias,
    InputMutation,
    Program,
    SizeInput,
    StateInput,
)
from aotexport_runtime.values import sizes


@dataclass(frozen=True)
class Functional:
    """Facts for guards of a functional graph.

    Attributes:
        program: its program; for guards of inputs, tensor subclasses are taken apart.
        record: its calling convention.
        graph: its operators.
        device_type: type of the devices that it runs on.
    """

    program: Program
    record: FunctionalGraph
    graph: Graph
    device_type: str

    @cached_property
    def tensors(self) -> list[Tensor]:
        """The tensors among its inputs."""
        inputs = enumerate(self.program.inputs)
        return [Tensor(index, spec) for index, spec in inputs if not isinstance(spec, SizeInput)]

    @cached_property
    def mutated(self) -> set[int]:
        """The inputs that it changes."""
        return {mutation.input_index for mutation in self.record.mutations}

    @cached_property
    def sizes(self) -> list[str]:
        """The symbols that sizes of tensors have, and no integer of the call."""
        integers = {spec.symbol for spec in self.program.inputs if isinstance(spec, SizeInput)}
        return [dimension.symbol for dimension in self.program.dimensions if dimension.symbol not in integers]

    @property
    def has_arguments(self) -> bool:
        """Whether a tensor is an argument of the caller."""
        return any(isinstance(tensor.spec, ArgumentInput) for tensor in self.tensors)

    @property
    def is_joint(self) -> bool:
        """Whether it records gradients."""
        return self.record.gradients is not None

    def shares_memory(self, *tensors: torch.Tensor) -> bool:
        """Return whether an input that the graph changes shares memory with another.

        Two storages may overlap, as those of two views of a NumPy array.
        """
        mutated = self.mutated
        spans: list[tuple[int, int, bool]] = []
        for known, tensor in zip(self.tensors, tensors, strict=True):
            storage = tensor.untyped_storage()
            if pointer := storage.data_ptr():
                spans.append((pointer, pointer + storage.nbytes(), known.index in mutated))
        spans.sort()
        end, was_mutated = 0, False
        for low, high, is_mutated in spans:
            if low < end and (was_mutated or is_mutated):
                return True
            was_mutated = is_mutated
            end = max(end, high)
        return False


@dataclass(frozen=True)
class Tensor:
    """A tensor among the inputs."""

    index: int
    spec: ArgumentInput | StateInput

    @property
    def variable(self) -> str:
        """Name of its variable."""
        return input_name(self.index)


def _lazy(graph: Functional) -> list[Tensor]:
    floats = ("complex", "float", "bfloat")
    return [t for t in graph.tensors if isinstance(t.spec, ArgumentInput) and t.spec.meta.dtype.startswith(floats)]


def _with_grad(graph: Functional) -> list[Tensor]:
    """Return the inputs that gradients flow to, of which one must require grad."""
    return [tensor for tensor in graph.tensors if tensor.index not in _detached(graph)]


def _detached(graph: Functional) -> Sequence[int]:
    return () if graph.record.gradients is None else graph.record.gradients.detached_inputs


def _changed_leaves(graph: Functional) -> list[InputMutation]:
    inputs = graph.program.inputs
    return [
        mutation
        for mutation in graph.record.mutations
        if graph.is_joint and mutation.requires_grad and isinstance(inputs[mutation.input_index], ArgumentInput)
    ]


def _offsets(graph: Functional) -> list[Tensor]:
    """Return the inputs whose storage offset matters.

    A view without recorded steps is made by `as_strided` with its offset in the graph. If the graph writes to the base,
    that offset is into a new tensor, and right for the caller's only if the base begins where it did at capture; the
    same holds if the graph also changes its metadata. An `as_strided` in the graph counts from the caller's storage.
    """
    if any(node.op.startswith("aten::as_strided") for node in graph.graph.nodes):
        return graph.tensors
    written = {mutation.input_index for mutation in graph.record.mutations if mutation.data}
    viewed = {o.input_index for o in graph.record.outputs if isinstance(o, InputAlias) and o.steps is None}
    moved = {mutation.input_index for mutation in graph.record.mutations if mutation.data and mutation.metadata}
    return [tensor for tensor in graph.tensors if tensor.index in (written & viewed) | moved]


def _some_require_grad(tensors: Sequence[Tensor]) -> str:
    return " or ".join(f"{tensor.variable}.requires_grad" for tensor in tensors) or "False"


def _is_laid_out(source: GuardSource, tensor: Tensor) -> str:
    value, stride = tensor.variable, source.shape(tensor.spec.meta.stride)
    same = source.ask(same_layout, f"{value}.shape", f"{value}.stride()", stride)
    return f"{value}.stride() == {stride} or {same}"


def _other_strides(tensor: Tensor, call: Call) -> str:
    expected = tuple(value_of(step, call.symbols) for step in tensor.spec.meta.stride)
    return f"input {tensor.index} has strides {call.inputs[tensor.index].stride()}, captured with {expected}"


def _is_resolved(_: GuardSource, tensor: Tensor) -> str:
    value = tensor.variable
    return f"not {value}.is_neg()" + (
        f" and not {value}.is_conj()" if tensor.spec.meta.dtype.startswith("complex") else ""
    )


CALLER: tuple[GuardRule[Functional, Any], ...] = (
    GuardRule(
        name="transforms",
        cost="mode",
        of=lambda graph: [graph],
        holds=lambda source, graph: f"not {source.ask(transforms.active)}",
        message=lambda graph, call: "function transforms",
    ),
    GuardRule(
        # Under the caller's autocast every operator chooses its dtype anew; only the forward graph does so.
        name="autocast",
        cost="mode",
        of=lambda graph: [graph],
        holds=lambda source, graph: f"{source.ask(autocast_dtype, source.constant(graph.device_type))} is None",
        quick=lambda source, graph: without_autocast(source, graph.device_type),
        message=lambda graph, call: "autocast around the call",
    ),
    GuardRule(
        # A region of a program without gradients may record some. Under the caller's grad mode there are more.
        name="grad mode",
        cost="mode",
        of=lambda graph: [graph] if graph.is_joint else [],
        holds=lambda source, graph: source.ask(torch.is_grad_enabled) if graph.program.grad else "False",
        message=lambda graph, call: (
            "no gradients are recorded" if graph.program.grad else "gradients of an inference program"
        ),
    ),
    GuardRule(
        name="records",
        cost="tensor",
        of=lambda graph: [graph] if graph.is_joint else [],
        holds=lambda source, graph: _some_require_grad(graph.tensors),
        message=lambda graph, call: "no gradients are recorded",
    ),
    GuardRule(
        # A checkpoint ends its second run where the last tensor is saved: with all changes that eager makes before.
        name="checkpoint",
        cost="mode",
        of=lambda graph: [graph] if graph.is_joint and graph.mutated else [],
        holds=lambda source, graph: f"not {source.ask(transforms.checkpointed)}",
        message=lambda graph, call: "a checkpoint, which may end the call before its changes",
    ),
    GuardRule(
        name="records nothing",
        cost="tensor",
        of=lambda graph: [] if graph.is_joint else [graph],
        holds=lambda source, graph: (
            f"not ({source.ask(torch.is_grad_enabled)} and ({_some_require_grad(graph.tensors)}))"
        ),
        message=lambda graph, call: "gradients of an inference program",
    ),
    GuardRule(
        name="without grad",
        cost="tensor",
        of=lambda graph: [each for each in graph.tensors if graph.is_joint and not each.spec.meta.requires_grad],
        holds=lambda source, tensor: f"not {tensor.variable}.requires_grad",
        message=lambda tensor, call: f"input {tensor.index} requires grad, and did not at capture",
    ),
)
"""Guards of the modes around a call and of what requires grad, with tensor subclasses as inputs."""

INPUTS: tuple[GuardRule[Functional, Any], ...] = (
    GuardRule(
        name="no size is 0",
        cost="sizes",
        of=lambda graph: graph.sizes,
        holds=lambda source, symbol: f"{source.size(symbol)} != 0",
        message=lambda symbol, call: "a size is 0, and kernels of functional graphs do not all bear that",
    ),
    GuardRule(
        name="guard of the graph",
        cost="sizes",
        of=lambda graph: graph.record.guards,
        holds=lambda source, guard: source.condition(guard),
        message=lambda guard, call: f"the graph assumes {sizes.describe(guard)}",
    ),
    GuardRule(
        name="strides",
        cost="sizes",
        of=lambda graph: graph.tensors,
        holds=_is_laid_out,
        quick=lambda source, tensor: f"{tensor.variable}.stride() == {source.shape(tensor.spec.meta.stride)}",
        stricter=True,
        message=_other_strides,
    ),
    GuardRule(
        name="lazy",
        cost="tensor",
        of=_lazy,
        holds=_is_resolved,
        message=lambda tensor, call: f"input {tensor.index} is a conjugated or negated view",
    ),
    GuardRule(
        name="with grad",
        cost="tensor",
        of=lambda graph: [graph] if graph.is_joint else [],
        # If gradients flow to all inputs, `records` asks the same.
        holds=lambda source, graph: _some_require_grad(_with_grad(graph)),
        quick=lambda source, graph: _some_require_grad(_with_grad(graph)) if _detached(graph) else "True",
        message=lambda graph, call: "only inputs that get no gradient require grad",
    ),
    GuardRule(
        name="hooks",
        cost="tensor",
        # A joint backward would call them with None for outputs that have no gradient with regard to the input.
        of=lambda graph: reached_in_part(graph.graph, graph.record),
        holds=lambda source, index: f"not {input_name(index)}._backward_hooks",
        message=lambda index, call: f"input {index} has hooks, and some outputs have no gradient with regard to it",
    ),
    GuardRule(
        name="changed leaves",
        cost="tensor",
        of=_changed_leaves,
        holds=lambda source, mutation: f"{input_name(mutation.input_index)}.is_leaf is {mutation.is_leaf}",
        message=lambda mutation, call: (
            f"mutated input {mutation.input_index} is {'no' if mutation.is_leaf else 'a'} leaf, unlike at capture"
        ),
    ),
    GuardRule(
        name="offset",
        cost="sizes",
        of=_offsets,
        holds=lambda source, tensor: f"{tensor.variable}.storage_offset() == {source.size(tensor.spec.meta.offset)}",
        message=lambda tensor, call: f"input {tensor.index} does not begin where it did in its storage at capture",
    ),
    GuardRule(
        name="shared memory",
        cost="memory",
        of=lambda graph: [graph] if graph.mutated and graph.has_arguments else [],
        holds=lambda source, graph: (
            f"not {source.ask(graph.shares_memory, *(tensor.variable for tensor in graph.tensors))}"
        ),
        message=lambda graph, call: "a mutated input shares memory with another input",
    ),
)
"""Guards of the inputs of a functional graph; tensor subclasses are taken apart."""


DIRECT: tuple[GuardRule[Sequence[int], int], ...] = (
    GuardRule(
        name="alive",
        cost="tensor",
        of=lambda indices: indices,
        holds=lambda source, index: f"not {source.ask(transforms.may_be_dead, input_name(index))}",
        message=None,
    ),
)
"""Conditions of quick paths that pass inputs, by index, straight to a joint graph's autograd function."""

# --- native code --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class NativeCalls:
    """Facts for guards of the calls that native code of a functional graph with `count` inputs serves.

    `gradients`: per input the index of its gradient; None: it is no joint graph.
    """

    native: Lowered | Libraries | FrozenModel
    gradients: Sequence[int | None] | None
    symbols: Sequence[str]
    count: int


def _all_require_grad(source: GuardSource, calls: NativeCalls) -> str:
    wanted = [index for index, gradient in enumerate(calls.gradients or ()) if gradient is not None]
    return " and ".join(f"{input_name(index)}.requires_grad" for index in wanted) or "True"


def _is_served(source: GuardSource, calls: NativeCalls) -> str:
    inputs = ", ".join(map(input_name, range(calls.count)))
    symbols = ", ".join(f"{source.constant(symbol)}: {source.symbols[symbol]}" for symbol in calls.symbols)
    return f"{source.ask(calls.native.why_not, f'[{inputs}]', f'{{{symbols}}}')} is None"


NATIVE: tuple[GuardRule[NativeCalls, NativeCalls], ...] = (
    GuardRule(
        name="every gradient",
        cost="tensor",
        of=lambda calls: [calls],
        holds=_all_require_grad,
        message=lambda calls, call: "not every gradient is wanted",
    ),
    GuardRule(
        name="native code",
        cost="memory",
        of=lambda calls: [calls],
        holds=_is_served,
        message=lambda calls, call: str(calls.native.why_not(call.inputs, call.symbols)),
    ),
)
"""Guards of the calls that native code serves; its functional graph serves the others."""
