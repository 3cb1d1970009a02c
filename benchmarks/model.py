"""What a model of the benchmarks is, and what models are called with.

torch is imported by the functions that need it, never by this module, see `benchmarks.models`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import nn

Inputs = tuple[Any, ...] | Mapping[str, Any]
"""Example inputs: a tuple is passed by position, a mapping by keyword."""


@dataclass(frozen=True)
class Model:
    """A model with an example call.

    Attributes:
        name: as on the command line.
        summary: sizes, for a person to read.
        module: returns the module, in train mode; needs the model's library.
        inputs: returns the example call; needs torch alone.
        loss: scalar loss of the module's output; needs torch alone.
        only_in: the suites that the model is made for; empty: it is chosen by `--models`, for any suite.
        classes: module that defines the class of the output; systems that return it import that.
        sizes: returns the sizes that may vary, as `torch.export` takes them; None: they are those of the inputs.
    """

    name: str
    summary: str
    module: Callable[[], nn.Module]
    inputs: Callable[[], Inputs]
    loss: Callable[[Any], torch.Tensor]
    only_in: tuple[str, ...] = ()
    classes: str = ""
    sizes: Callable[[], Any] | None = None


def call(module: Callable[..., Any], inputs: Inputs) -> Any:
    """Return the module's output for example inputs."""
    return module(*inputs) if isinstance(inputs, tuple) else module(**inputs)


def by_position(inputs: Inputs) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the positional and the keyword arguments of example inputs."""
    return (inputs, {}) if isinstance(inputs, tuple) else ((), dict(inputs))


def floats(*shape: int) -> Callable[[], tuple[torch.Tensor]]:
    """Return the maker of a tensor of numbers between 0 and 1."""

    def inputs() -> tuple[torch.Tensor]:
        import torch

        return (torch.rand(*shape, generator=torch.Generator().manual_seed(0)),)

    return inputs


def tokens(vocabulary: int, *shape: int) -> torch.Tensor:
    """Return token numbers below `vocabulary`."""
    import torch

    return torch.randint(vocabulary, shape, generator=torch.Generator().manual_seed(0))


def gpt2_inputs() -> Inputs:
    """Return tokens with labels."""
    ids = tokens(4096, 2, 128)
    return {"input_ids": ids, "labels": ids.clone()}


def bert_inputs() -> Inputs:
    """Return tokens, a mask, and a label per sequence."""
    import torch

    ids = tokens(8000, 4, 128)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": torch.tensor([0, 1, 1, 0])}


def images() -> Inputs:
    """Return 8 images with labels."""
    import torch

    pixels = torch.rand(8, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    return {"pixel_values": pixels, "labels": torch.arange(8) % 10}


def sentences() -> Inputs:
    """Return tokens and a mask."""
    import torch

    ids = tokens(30000, 4, 64)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def cross_entropy(logits: torch.Tensor) -> torch.Tensor:
    """Return the loss of logits for fixed classes."""
    import torch

    classes = torch.arange(logits.shape[0]) % logits.shape[1]
    return torch.nn.functional.cross_entropy(logits, classes)


def own_loss(output: Any) -> torch.Tensor:
    """Return the loss that the model computes, its first output; some systems return no more than the outputs."""
    return output[0] if isinstance(output, list | tuple) else output.loss


def mean_square(output: Any) -> torch.Tensor:
    """Return the mean of the squared output, or of the first one."""
    import torch

    states = output if isinstance(output, torch.Tensor) else output[0]
    return states.square().mean()


def sequence_sizes(*names: str, most: int = 512) -> Callable[[], Any]:
    """Return the maker of sizes: batch and length of the named inputs vary, the length up to `most`."""

    def sizes() -> Any:
        from torch.export import Dim

        varying = {0: Dim("batch", min=2, max=64), 1: Dim("length", min=2, max=most)}
        return dict.fromkeys(names, varying)

    return sizes


def batch_sizes(*names: str, most: int = 64) -> Callable[[], Any]:
    """Return the maker of sizes: the batch of the named inputs varies, up to `most`."""

    def sizes() -> Any:
        from torch.export import Dim

        varying = {0: Dim("batch", min=2, max=most)}
        return dict.fromkeys(names, varying)

    return sizes
