"""Epilogue: changes that the program made to its inputs, applied to the caller's tensors.

Source: torch 2.13, `_functorch/_aot_autograd/runtime_wrappers.py`, `_RuntimeForwardEpilogue._apply_input_mutations`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from aotexport_runtime.call.holder import unwrap
from aotexport_runtime.schema.program import InputMutation


def apply_mutations(mutations: Sequence[InputMutation], inputs: Sequence[Any], updated: Sequence[Any]) -> None:
    """Write each updated value into the input it belongs to.

    Args:
        mutations: what happened, per updated value.
        inputs: the program's inputs; mutated in place.
        updated: new values, one per mutation; metadata-only ones may be held.
    """
    for mutation, value in zip(mutations, updated, strict=True):
        _apply(mutation, inputs[mutation.input_index], unwrap(value))


def _apply(mutation: InputMutation, original: torch.Tensor, updated: torch.Tensor) -> None:
    if mutation.storage:
        with torch.no_grad():
            original.set_(updated)  # pyright: ignore[reportArgumentType] (torch's stub lacks tensors as sources)
        return
    if mutation.metadata:
        with torch.set_grad_enabled(torch.is_grad_enabled() and not mutation.under_no_grad):
            original.as_strided_(updated.size(), updated.stride(), updated.storage_offset())
    if not mutation.data:
        return
    if mutation.is_leaf and original.requires_grad:
        # Only changes that autograd does not see are possible on a leaf that requires grad.
        original.detach().copy_(updated)
    elif mutation.under_no_grad:
        with torch.no_grad():
            original.copy_(updated)
    else:
        original.copy_(updated)
