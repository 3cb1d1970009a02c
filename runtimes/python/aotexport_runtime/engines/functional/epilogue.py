"""Epilogues: changes of inputs, then outputs that are, or are views of, inputs, intermediates or other outputs.

A view is made anew from its base, or from another view that the model made it of and returns, so that autograd knows it
as a view of the caller's tensor: by the recorded view operators where there are any, else by `as_strided`.

Source: torch 2.13, `_functorch/_aot_autograd/functional_utils.py`, `gen_alias_from_base`; `runtime_wrappers.py`,
`_RuntimeForwardEpilogue._apply_input_mutations`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from msgspec.structs import replace
from torch.autograd.graph import increment_version

from aotexport_runtime.engines.functional.tangents import flowless_outputs
from aotexport_runtime.execution import ops
from aotexport_runtime.execution.codegen import Environment, constant_value
from aotexport_runtime.schema.graph import Graph
from aotexport_runtime.schema.program import (
    FreshOutput,
    FunctionalGraph,
    InputAlias,
    InputItself,
    InputMutation,
    IntermediateAlias,
    OutputAlias,
    Program,
    SizeInput,
    ViewStep,
)
from aotexport_runtime.validate.arguments import references


class OpaqueTensor(NamedTuple):
    """A box that carries an alias out of an autograd function, unseen by autograd."""

    tensor: torch.Tensor


def unwrap(value: Any) -> Any:
    """Return the tensor of a box, or `value` itself."""
    return value.tensor if value.__class__ is OpaqueTensor else value


# --- changes of inputs --------------------------------------------------------------------------------------


class Mutations:
    """The changes of a functional graph to its inputs: their data, metadata, storage, versions; `count`: how many."""

    def __init__(self, functional: FunctionalGraph) -> None:
        """Prepare the mutations of `functional`."""
        self.count = len(functional.mutations)
        rises = {rise.input_index: rise.by for rise in functional.version_rises}
        self._writes: list[tuple[InputMutation, bool]] = []
        for mutation in functional.mutations:
            own = mutation.data + mutation.metadata + mutation.storage
            rise = rises.pop(mutation.input_index, own)
            silent = (mutation.data or mutation.storage) and rise < own
            rises[mutation.input_index] = rise - own + silent
            self._writes.append((mutation, silent))
        self._rises = [index for index, by in rises.items() for _ in range(by)]
        # Changes of elements alone, which may be written together where no gradients are recorded.
        self._plain = all(m.data and not (m.metadata or m.storage or silent) for m, silent in self._writes)

    def apply(self, inputs: Sequence[Any], updated: Sequence[Any]) -> None:
        """Write their new values, the first of the graph's results (`updated`), into `inputs`; some are opaque."""
        if self._plain and self.count and not torch.is_grad_enabled():
            torch._foreach_copy_(
                [inputs[mutation.input_index] for mutation, _ in self._writes], [*map(unwrap, updated[: self.count])]
            )
        else:
            for (mutation, silent), value in zip(self._writes, updated, strict=False):
                _apply(mutation, inputs[mutation.input_index], unwrap(value), silent)
        increment_version([inputs[index] for index in self._rises if not inputs[index].is_inference()])


def _apply(mutation: InputMutation, original: torch.Tensor, updated: torch.Tensor, silent: bool) -> None:
    if mutation.storage:
        if silent:
            original.data = updated
            return
        with torch.no_grad():
            original.set_(updated)  # pyrefly: ignore[bad-argument-type] (torch's stub lacks tensors as sources)
        return
    if mutation.metadata:
        with torch.set_grad_enabled(torch.is_grad_enabled() and not mutation.under_no_grad):
            original.as_strided_(updated.size(), updated.stride(), updated.storage_offset())
    if not mutation.data:
        return
    if silent:
        # Kernels, and models through `.data`, write without a new version.
        original.data.copy_(updated)
    elif mutation.is_leaf and original.requires_grad:
        # A leaf that requires grad can only be changed without autograd.
        original.detach().copy_(updated)
    elif mutation.under_no_grad:
        with torch.no_grad():
            original.copy_(updated)
    else:
        original.copy_(updated)


# --- outputs ------------------------------------------------------------------------------------------------

Alias = InputAlias | IntermediateAlias | OutputAlias

Regenerate = Callable[[Sequence[Any], Sequence[Any], Sequence[Any]], Any]
"""`(inputs, outputs and bases as returned, outputs for the caller so far) -> output for the caller`."""


def regenerators(
    program: Program, functional: FunctionalGraph, graph: Graph, environment: Environment
) -> list[tuple[int, Regenerate]] | None:
    """Return the outputs that the epilogue makes, by index and in order, each with how; None: it makes none."""
    flowless = flowless_outputs(functional)
    if all(isinstance(output, FreshOutput) for output in functional.outputs) and not flowless:
        return None
    through = _views_of_views(functional, graph)
    made = [i for i, output in enumerate(functional.outputs) if i in flowless or not isinstance(output, FreshOutput)]
    return [
        (i, _flowless(i) if i in flowless else _regenerator(i, through.get(i), program, functional, environment))
        for i in (*(i for i in made if i not in through), *through)
    ]


def _views_of_views(functional: FunctionalGraph, graph: Graph) -> dict[int, int]:
    """Return, per view that is made of another returned view of its base, the index of the other.

    Gradients flow through both. A view comes after the view that it is made of.
    """
    first = len(functional.mutations)
    views = {
        name: (index, output)
        for index, output in enumerate(functional.outputs)
        for name in references(graph.outputs[first + index])
        if isinstance(output, Alias) and output.requires_grad
    }
    # Per value, the nearest of the views that it is or is made of.
    nearest: dict[str, tuple[int, Alias]] = {}
    found: dict[int, int] = {}
    for node in graph.nodes:
        source = next(iter(references(node.args[0])), None) if node.args else None
        behind = nearest.get(source) if source is not None else None
        own = views.get(node.name)
        if own is not None and behind is not None and _is_part(own[1], behind[1]):
            found[own[0]] = behind[0]
        view = own or behind
        if view is not None:
            nearest[node.name] = view
    return found


def _base(output: Alias) -> tuple[type, int]:
    if isinstance(output, InputAlias):
        return InputAlias, output.input_index
    return type(output), output.base_index if isinstance(output, IntermediateAlias) else output.output_index


def _is_part(output: Alias, other: Alias) -> bool:
    """Return whether both are views of one base and, if both have steps, those of `other` begin those of `output`."""
    is_begun = output.steps is None or other.steps is None or output.steps[: len(other.steps)] == other.steps
    return is_begun and _base(output) == _base(other)


def _flowless(index: int) -> Regenerate:
    """Return a function that makes a view under `torch.no_grad` of a result that requires grad."""

    def make(inputs: Sequence[Any], returned: Sequence[Any], outputs: Sequence[Any]) -> torch.Tensor:
        with torch.no_grad():
            return returned[index].view_as(returned[index])

    return make


def _regenerator(
    index: int, through: int | None, program: Program, functional: FunctionalGraph, environment: Environment
) -> Regenerate:
    """Return a function that makes an output from its base, or from the returned view at `through`."""
    output, steps = functional.outputs[index], None
    assert not isinstance(output, FreshOutput)
    if isinstance(output, InputItself):
        input_index = output.input_index
        return lambda inputs, returned, outputs: inputs[input_index]
    # Where the base is: among the inputs, the results, or the outputs for the caller.
    if through is not None:
        other = functional.outputs[through]
        assert isinstance(other, Alias)
        source, place, like_base = 2, through, True
        steps = output.steps[len(other.steps) :] if output.steps is not None and other.steps is not None else None
    elif isinstance(output, InputAlias):
        spec = program.inputs[output.input_index]
        source, place, steps = 0, output.input_index, output.steps
        like_base = not isinstance(spec, SizeInput) and spec.meta.requires_grad
    else:
        is_base = isinstance(output, IntermediateAlias)
        place = len(functional.outputs) + output.base_index if is_base else output.output_index
        source, steps, like_base = 1, output.steps, _requires_grad(functional, output)
    view = _viewer(replace(output, steps=steps), environment, like_base=like_base)
    return lambda *where: view(unwrap(where[source][place]), unwrap(where[1][index]))


def _requires_grad(functional: FunctionalGraph, view: IntermediateAlias | OutputAlias) -> bool:
    """Return whether the base of a view of a result required grad at capture."""
    if isinstance(view, OutputAlias):
        base = functional.outputs[view.output_index]
        return isinstance(base, FreshOutput) and base.requires_grad
    tangents = functional.gradients.tangents if functional.gradients is not None else ()
    return any(tangent.of == "intermediate_base" and tangent.index == view.base_index for tangent in tangents)


def _viewer(
    output: Alias, environment: Environment, *, like_base: bool
) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """Return a function that makes the view `output` of `(its base, its value)`.

    `like_base`: whether the base required grad at capture. A view that required grad as its base did follows the
    base in every call.
    """
    like_base = like_base is output.requires_grad
    requires_grad, under_no_grad = output.requires_grad, output.under_no_grad
    steps = [_step(step, environment) for step in output.steps] if output.steps is not None else None

    def view(base: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        if under_no_grad:
            with torch.no_grad():
                return regenerate(base, target)
        return regenerate(base, target)

    def regenerate(base: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        alias = functools.reduce(lambda value, step: step(value), steps, base) if steps is not None else None
        if alias is None or alias.shape != target.shape:
            alias = _as_strided(base, target)
        if like_base:
            return alias
        return alias.requires_grad_() if requires_grad else alias.detach()

    return view


def _step(step: ViewStep, environment: Environment) -> Callable[[torch.Tensor], torch.Tensor]:
    function = ops.resolve(step.op, None, environment.namespaces)
    arguments = [constant_value(argument, environment) for argument in step.args]
    return lambda base: function(base, *arguments)


def _as_strided(base: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    if base.is_complex() and not target.is_complex():
        base = torch.view_as_real(base)
    elif target.is_complex() and not base.is_complex():
        base = torch.view_as_complex(base)
    elif base.dtype != target.dtype:
        base = base.view(target.dtype)
    return base.as_strided(target.size(), target.stride(), target.storage_offset())
