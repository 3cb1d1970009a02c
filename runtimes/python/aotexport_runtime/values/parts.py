"""Tensors in parts over ranks: gathered one by one, in one order, for the first rank, which writes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import torch

from aotexport_runtime.errors import NotSupported, NotWritten


def is_distributed(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is a `DTensor`, of which this rank may hold a part."""
    return hasattr(tensor, "full_tensor")


class Gathering:
    """The tensors of a module that are still to be gathered; every rank gathers all of them."""

    def __init__(self, tensors: Iterable[torch.Tensor], *, in_parts: bool) -> None:
        """Plan to gather tensors.

        Args:
            tensors: tensors of the module, in the order in which they are gathered.
            in_parts: whether distributed tensors among them are in parts, and the programs read them whole.
        """
        self.in_parts = in_parts
        """Whether anything is to be gathered."""
        self._left: deque[Any] = deque(t for t in tensors if in_parts and is_distributed(t))

    def whole(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor whole; every rank asks for those in parts in the same order, each once."""
        if not self._left or self._left[0] is not tensor:
            return tensor
        return self._left.popleft().full_tensor()

    def written_by_first_rank(self, write: Callable[[], None]) -> None:
        """Run `write` on rank 0 alone, which may ask for whole tensors; return on all ranks when it is done.

        Raises:
            NotSupported: see `write`; on every rank.
            NotWritten: rank 0 could not write; on every rank.
        """
        import torch.distributed as dist

        failed: Exception | None = None
        if dist.get_rank() == 0:
            try:
                write()
            except Exception as error:  # noqa: BLE001 (the other ranks wait, and raise it too)
                failed = error
        while self._left:
            self._left.popleft().full_tensor()
        told: list[Any] = [None if failed is None else (str(failed), getattr(failed, "errno", None))]
        dist.broadcast_object_list(told, src=0)
        if failed is not None:
            raise failed
        if told[0] is not None:
            text, number = told[0]
            message = f"rank 0 could not write: {text}"
            raise NotSupported(message) if number is None else NotWritten(message, number)
