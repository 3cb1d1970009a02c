"""The adapters of one tensor: low-rank changes of a weight, and tensors trained whole."""

from __future__ import annotations

import torch
from torch import nn

from aotexport_runtime.adapters.base import checksum, digest_of, remember
from aotexport_runtime.adapters.choice import NamedAdapter
from aotexport_runtime.adapters.factors import Factors


class Lora(NamedAdapter):
    """Low-rank changes of a weight, a `Factors` per adapter."""

    _before = ("", 0)
    """Digest of the weight before a merge, and its checksum after."""

    def adapted(
        self, result: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """Return the adapted result of an operator; see `Adapter`."""
        for factors in self.applied():
            result = factors(result, x, weight, bias)
        return result

    def adapted_tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the changed weight."""
        for factors in self.applied():
            tensor = factors.merged(tensor)
        return tensor

    def merge(self, module: nn.Module, names: tuple[str, ...]) -> None:
        """Change the weight of `module` by adapters, in place."""
        weight, held = getattr(module, self.tensor), self._held(names)
        digest = digest_of(weight) if held else ""
        for factors in held:
            if factors.magnitude is not None:
                factors.ratio = factors.along_outputs(factors.magnitude / factors.norm(weight)).detach()
            weight.copy_(factors.merged(weight))
        self._before = digest, checksum(weight) if held else 0

    def unmerge(self, module: nn.Module, names: tuple[str, ...]) -> None:
        """Take a change by `merge` back, but for rounding."""
        weight, held = getattr(module, self.tensor), self._held(names)
        unchanged = bool(held) and self._before[1] == checksum(weight)
        for factors in reversed(held):
            if factors.ratio is not None:
                weight /= factors.ratio.to(weight.dtype)
                factors.ratio = None
            weight -= factors.product().to(weight.dtype)
        if unchanged:
            remember(weight, self._before[0])

    def _held(self, names: tuple[str, ...]) -> list[Factors]:
        return [factors for name in names if (factors := self.change(name)) is not None]


class Trained(NamedAdapter):
    """Tensors that are trained in the place of a parameter of the module, one per adapter."""

    def adapted_tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the parameter of the last adapter that has one."""
        own = self.applied()
        return own[-1] if own else tensor

    def merge(self, module: nn.Module, names: tuple[str, ...]) -> None:
        """Exchange the values of the module's parameter and of the last adapter's."""
        own = [parameter for name in names if (parameter := self.change(name)) is not None]
        if own:
            tensor: torch.Tensor = getattr(module, self.tensor)
            before = tensor.clone()
            tensor.copy_(own[-1])
            own[-1].copy_(before)

    def unmerge(self, module: nn.Module, names: tuple[str, ...]) -> None:
        """Exchange them again."""
        self.merge(module, names)
