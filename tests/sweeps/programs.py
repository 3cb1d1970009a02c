"""`torch._export.db`: what `torch.export` documents to support, and not to, with and without gradients of inputs."""

import copy
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch._export.db.examples import all_examples, get_rewrite_cases  # noqa: TID251

from tests.sweeps.sample import Items, Sample

EXCLUDED = {"user_input_mutation grad": "eager refuses it: a leaf that requires gradients is written to"}
"""Programs that are not run, with the reason."""


def items() -> Items:
    """Return the programs, by name and whether gradients are asked for."""
    found: Items = {}
    for case in all_examples().values():
        for program in (case, *get_rewrite_cases(case)):
            found[program.name] = partial(_samples, program, False)
            if any(_differentiable(value) for value in program.example_args):
                found[f"{program.name} grad"] = partial(_samples, program, True)
    return found


def _samples(case: Any, grad: bool) -> Iterator[Sample]:
    torch.manual_seed(0)
    args = tuple(_renewed(value, grad) for value in case.example_args)
    options = {"dynamic_shapes": case.dynamic_shapes} if case.dynamic_shapes else {}
    yield Sample(copy.deepcopy(case.model), args, dict(case.example_kwargs), options)


def _renewed(value: Any, grad: bool) -> Any:
    """Return an argument with values that do not depend on what else the collection made before."""
    return torch.randn(value.shape, dtype=value.dtype, requires_grad=grad) if _differentiable(value) else value


def _differentiable(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()
