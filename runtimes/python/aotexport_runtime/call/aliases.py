"""Epilogue: outputs that are, or are views of, inputs, intermediates or other outputs.

A view is made anew from its base, so that autograd knows it as a view of the caller's tensor: by the recorded view
operators where there are any, else by `as_strided`.

Source: torch 2.13, `_functorch/_aot_autograd/functional_utils.py`, `gen_alias_from_base`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from aotexport_runtime import ops
from aotexport_runtime.call.holder import unwrap
from aotexport_runtime.call.tangents import flowless_outputs
from aotexport_runtime.engines.codegen import Environment, constant_value
from aotexport_runtime.schema.program import (
    FreshOutput,
    FunctionalGraph,
    InputAlias,
    InputItself,
    IntermediateAlias,
    OutputAlias,
    OutputSpec,
    Program,
    SizeInput,
    ViewStep,
)

Regenerate = Callable[[Sequence[Any], Sequence[Any], Any], Any]
"""`(inputs, outputs and bases as returned, this output as returned) -> output for the caller`."""


def regenerators(program: Program, functional: FunctionalGraph, environment: Environment) -> list[Regenerate] | None:
    """Return one function per output, or None when every output is returned as it is."""
    flowless = flowless_outputs(functional)
    if all(isinstance(output, FreshOutput) for output in functional.outputs) and not flowless:
        return None
    return [
        _flowless if index in flowless else _regenerator(output, program, functional, environment)
        for index, output in enumerate(functional.outputs)
    ]


def _flowless(inputs: Sequence[Any], returned: Sequence[Any], value: torch.Tensor) -> torch.Tensor:
    """Return a view that requires grad, and that autograd knows to be made under `torch.no_grad`."""
    with torch.no_grad():
        return value.view_as(value)


def _regenerator(
    output: OutputSpec, program: Program, functional: FunctionalGraph, environment: Environment
) -> Regenerate:
    count = len(functional.outputs)
    if isinstance(output, FreshOutput):
        return lambda inputs, returned, value: value
    if isinstance(output, InputItself):
        input_index = output.input_index
        return lambda inputs, returned, value: inputs[input_index]
    if isinstance(output, InputAlias):
        input_index = output.input_index
        spec = program.inputs[input_index]
        view = _viewer(output, environment, like_base=not isinstance(spec, SizeInput) and spec.meta.requires_grad)
        return lambda inputs, returned, value: view(inputs[input_index], unwrap(value))
    view = _viewer(output, environment, like_base=_requires_grad(functional, output))
    base_index = count + output.base_index if isinstance(output, IntermediateAlias) else output.output_index
    return lambda inputs, returned, value: view(unwrap(returned[base_index]), unwrap(value))


def _requires_grad(functional: FunctionalGraph, view: IntermediateAlias | OutputAlias) -> bool:
    """Return whether the base of a view of a result required grad at capture."""
    if isinstance(view, OutputAlias):
        base = functional.outputs[view.output_index]
        return isinstance(base, FreshOutput) and base.requires_grad
    tangents = functional.gradients.tangents if functional.gradients is not None else ()
    return any(tangent.of == "intermediate_base" and tangent.index == view.base_index for tangent in tangents)


def _viewer(
    output: InputAlias | IntermediateAlias | OutputAlias, environment: Environment, *, like_base: bool
) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """Return a function that makes the view `output` of `(its base, its value)`.

    Args:
        output: the view.
        environment: namespaces and device.
        like_base: whether the base required grad at capture: where the view did as its base did, it does in every
            call, whatever the caller's tensors are.
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
        alias = _replay(base, steps) if steps is not None else None
        if alias is None or alias.shape != target.shape:
            alias = _as_strided(base, target)
        if like_base:
            return alias
        if base.requires_grad and not requires_grad:
            return alias.detach()
        if requires_grad and not base.requires_grad and torch.is_grad_enabled():
            return alias.requires_grad_(True)
        return alias

    return view


def _replay(base: torch.Tensor, steps: Sequence[Callable[[torch.Tensor], torch.Tensor]]) -> torch.Tensor:
    for step in steps:
        base = step(base)
    return base


def _step(step: ViewStep, environment: Environment) -> Callable[[torch.Tensor], torch.Tensor]:
    function = ops.resolve(step.op, None, environment.namespaces)
    ops.check_call(step.op, function, ["base", *step.args], {})
    arguments = [constant_value(argument, environment) for argument in step.args]
    if step.item is None:
        return lambda base: function(base, *arguments)
    item = step.item
    return lambda base: function(base, *arguments)[item]


def _as_strided(base: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    if base.is_complex() and not target.is_complex():
        base = torch.view_as_real(base)
    elif target.is_complex() and not base.is_complex():
        base = torch.view_as_complex(base)
    elif base.dtype != target.dtype:
        base = base.view(target.dtype)
    return base.as_strided(target.size(), target.stride(), target.storage_offset())
