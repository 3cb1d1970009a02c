"""Adapters: modules that change what the tensors of a loaded module compute, without a change of the module."""

# The tables of a module have no public names.
# pyright: reportPrivateUsage=false

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from aotexport_runtime.errors import NotSupported


class Adapter(nn.Module):
    """What is called beside the nodes that read a tensor of the module that holds it.

    Attributes:
        tensor: name of the tensor in its module.
        in_weight: whether it takes the place of the tensor (weight space), or changes the results of nodes that read it
            (graph space).
    """

    def __init__(self, tensor: str, *, in_weight: bool) -> None:
        """Adapt `tensor`.

        Args:
            tensor: see the attribute.
            in_weight: see the attribute.
        """
        super().__init__()
        self.tensor = tensor
        self.in_weight = in_weight

    def is_needed(self) -> bool:
        """Return whether calls need it; a change is to be told to the loaded module."""
        raise NotImplementedError

    def adapted(
        self, result: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """Return the adapted result of an operator.

        Args:
            result: what the operator returned.
            x: its input.
            weight: the tensor.
            bias: its bias; None: it has none.
        """
        raise NotImplementedError

    def adapted_tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor that calls read in place of `tensor`."""
        raise NotImplementedError


def adapters_in(module: nn.Module) -> list[Adapter]:
    """Return the adapters that `module` itself holds."""
    return [child for child in module._modules.values() if isinstance(child, Adapter)]


def adapters_below(whole: nn.Module) -> dict[str, list[Adapter]]:
    """Return all adapters, by the path of the module that holds them."""
    found = {path: adapters_in(module) for path, module in whole.named_modules() if not isinstance(module, Adapter)}
    return {path: adapters for path, adapters in found.items() if adapters}


def adapted_call(module: nn.Module, result: torch.Tensor, args: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the adapted result of a call of a layer by the code of its class.

    Raises:
        NotSupported: an adapter takes the place of a tensor, which that code does not know.
    """
    for adapter in adapters_in(module):
        if adapter.is_needed() and adapter.in_weight:
            raise NotSupported(
                f"a `{type(module).__name__}` computes with its own `{adapter.tensor}` here, and has an adapter that "
                "takes its place. Merge the adapter first (`aotexport_runtime.adapters.merge_adapter`)"
            )
        if adapter.is_needed():
            result = adapter.adapted(result, args[0], getattr(module, adapter.tensor), getattr(module, "bias", None))
    return result
