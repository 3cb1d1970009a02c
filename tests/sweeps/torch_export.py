"""The models of `libraries` and of the zoo by a peer: `torch.export` with the same dynamic axes, compared with eager.

The peer's graph is asked for outputs, and in training for gradients, of the example call; with dynamic axes also of a
call that is one smaller along each. Equal means the same numbers within `TOLERANCE` of the largest of a tensor.
"""

import copy
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_leaves  # noqa: TID251

from tests.sweeps import libraries, zoo
from tests.sweeps.run import stable
from tests.sweeps.sample import Items, Sample
from tests.sweeps.table import EQUAL, REFUSED, WRONG, Outcome

ZOO = "transformers/"
"""What the names of the zoo's models begin with here."""

TOLERANCE = 1e-4
"""What a number may be off, as a share of the largest of its tensor. Gradients of these models round that much less."""

EXCLUDED = libraries.EXCLUDED | {ZOO + item: reason for item, reason in zoo.EXCLUDED.items()}


def items() -> Items:
    """Return the models, by library, name and whether the sizes are dynamic."""
    return libraries.items() | {ZOO + item: make for item, make in zoo.items().items()}


def run(samples: Iterable[tuple[str, Sample]], directory: Path) -> dict[str, list[Outcome]]:
    """Return how the samples of each item came out, as `tests.sweeps.run.run` does.

    Args:
        samples: what to run, with the item that each belongs to.
        directory: not used.
    """
    return {item: [_outcome(sample)] for item, sample in samples}


def _outcome(sample: Sample) -> Outcome:
    shapes = sample.options.get("dynamic_shapes")
    calls = [sample.kwargs] + ([_smaller(sample.kwargs, shapes)] if shapes else [])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for mode in sample.options.get("programs", ("train", "infer")):
            training = mode == "train"
            module = sample.function.train(training)
            twin = copy.deepcopy(module)
            try:
                program = torch.export.export(module, (), sample.kwargs, dynamic_shapes=shapes, strict=False).module()
            except Exception as error:
                return Outcome(REFUSED, f"{mode}: {type(error).__name__}: {stable(str(error))}")
            for kwargs in calls:
                try:
                    for found, eager in zip(
                        _results(program, kwargs, training), _results(twin, kwargs, training), strict=True
                    ):
                        largest = eager.abs().max().item() if eager.is_floating_point() and eager.numel() else 0
                        torch.testing.assert_close(found, eager, rtol=0, atol=TOLERANCE * largest, equal_nan=True)
                except Exception as error:
                    return Outcome(WRONG, f"{mode}: {type(error).__name__}: {stable(str(error))}")
    return Outcome(EQUAL)


def _smaller(kwargs: dict[str, Any], shapes: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call that is one smaller along each dynamic axis."""
    smaller = dict(kwargs)
    for name, axes in shapes.items():
        for axis in axes or {}:
            smaller[name] = smaller[name].narrow(axis, 0, smaller[name].shape[axis] - 1).clone()
    return smaller


def _results(module: Any, kwargs: dict[str, Any], training: bool) -> list[torch.Tensor]:
    """Return output tensors, and in training the gradients of the weights, by name."""
    torch.manual_seed(1)
    with torch.set_grad_enabled(training):
        outputs = [value for value in tree_leaves(module(**copy.deepcopy(kwargs))) if torch.is_tensor(value)]
    weights = [weight for _, weight in sorted(module.named_parameters()) if weight.requires_grad]
    sums = [value.sum() for value in outputs if value.requires_grad]
    gradients = torch.autograd.grad(sums, weights, allow_unused=True, materialize_grads=True) if training else ()
    return [*(value.detach() for value in outputs), *gradients]
