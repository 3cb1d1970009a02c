"""The state of a model, put back as it was after a call for real."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from aotexport.capture.state import State
from aotexport_runtime.subclasses import is_wrapper, parts


@contextlib.contextmanager
def restored(state: State) -> Iterator[None]:
    """Give the state back as it was: data, metadata, gradients, places, and the random generator."""
    before = [
        _Before.of(tensor)
        for entry in state.entries
        for tensor in (entry.tensor, *(parts(entry.tensor) if is_wrapper(entry.tensor) else ()))
    ]
    slots = [(table, key, table[key]) for entry in state.entries for table, key in entry.slots]
    random_state = torch.get_rng_state()
    grad_mode = torch.is_grad_enabled()
    for entry in state.entries:
        if entry.tensor.is_leaf:
            entry.tensor.grad = None
    try:
        yield
    finally:
        torch.set_grad_enabled(grad_mode)
        torch.set_rng_state(random_state)
        for table, key, tensor in slots:
            table[key] = tensor
        for tensor in before:
            tensor.put_back()


@dataclass(frozen=True)
class _Before:
    """A tensor as it was: an alias of its memory with its sizes and strides, its elements, and what autograd knew.

    A tensor subclass has no memory of its own; its parts are kept beside it.
    """

    tensor: torch.Tensor
    version: int
    alias: torch.Tensor | None
    elements: torch.Tensor | None
    is_leaf: bool
    requires_grad: bool
    grad: torch.Tensor | None

    @classmethod
    def of(cls, tensor: torch.Tensor) -> _Before:
        alias = None if is_wrapper(tensor) else tensor.detach()
        elements = None if alias is None else alias.clone()
        grad = tensor.grad if tensor.is_leaf else None
        return cls(tensor, tensor._version, alias, elements, tensor.is_leaf, tensor.requires_grad, grad)

    def put_back(self) -> None:
        """Undo what was done to the tensor since."""
        if self.alias is not None and self.elements is not None:
            seen = self.tensor._version != self.version
            if seen or _changed_unseen(self.tensor, self.alias, self.elements):
                self._put_back_elements(self.alias, self.elements)
        if self.is_leaf and not self.tensor.is_leaf and not self.tensor._is_view():
            self.tensor.detach_()
        if self.tensor.is_leaf:
            self.tensor.requires_grad_(self.requires_grad)
            self.tensor.grad = self.grad

    @torch.no_grad()
    def _put_back_elements(self, alias: torch.Tensor, elements: torch.Tensor) -> None:
        if not self.tensor.is_set_to(alias):
            self.tensor.data = alias
        # No call can have written to an expanded tensor, nor can we.
        if all(step or size <= 1 for size, step in zip(alias.shape, alias.stride(), strict=True)):
            alias.copy_(elements)


def _changed_unseen(tensor: torch.Tensor, alias: torch.Tensor, elements: torch.Tensor) -> bool:
    """Return whether `tensor` may have changed under the same version: by kernels, or through `.data`."""
    is_byte = elements.is_floating_point() and elements.element_size() == 1
    comparable = not is_byte and elements.dtype is not torch.complex32
    return not (comparable and tensor.is_set_to(alias) and torch.equal(alias, elements))
