"""Epilogue: changes that the program made to its inputs, applied to the caller's tensors.

Source: torch 2.13, `_functorch/_aot_autograd/runtime_wrappers.py`, `_RuntimeForwardEpilogue._apply_input_mutations`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd.graph import increment_version

from aotexport_runtime.engines.functional.opaque import unwrap
from aotexport_runtime.schema.program import FunctionalGraph, InputMutation


class Mutations:
    """The changes of a functional graph to its inputs: their data, metadata, storage, and versions.

    Attributes:
        count: how many updated values the graph returns.
    """

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
        self._rises = [(index, by) for index, by in rises.items() if by > 0]

    def apply(self, inputs: Sequence[Any], updated: Sequence[Any]) -> None:
        """Write each updated value into the input it belongs to.

        Args:
            inputs: the program's inputs; mutated in place.
            updated: results of the graph: new values, one per mutation, then others; aliases may be opaque.
        """
        for (mutation, silent), value in zip(self._writes, updated, strict=False):
            _apply(mutation, inputs[mutation.input_index], unwrap(value), silent)
        for index, by in self._rises:
            if not inputs[index].is_inference():
                for _ in range(by):
                    increment_version(inputs[index])


def _apply(mutation: InputMutation, original: torch.Tensor, updated: torch.Tensor, silent: bool) -> None:
    if mutation.storage:
        if silent:
            original.data = updated
            return
        with torch.no_grad():
            original.set_(updated)  # pyright: ignore[reportArgumentType] (torch's stub lacks tensors as sources)
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
