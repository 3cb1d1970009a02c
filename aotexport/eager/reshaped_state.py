"""Whether a call that changes the shape of the module's tensors matters to later calls, by calls for real."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from aotexport.eager.python_state import with_other_inputs
from aotexport.eager.run import copies, eager_run
from aotexport.errors import ExportFailed
from aotexport.model.call import ExampleCall
from aotexport.model.mode import Mode
from aotexport.model.refusals import attempt
from aotexport.model.state import State, StateEntry
from aotexport.model.structure import flattened
from aotexport.values.same_tensors import are_same


def only_prepares(call: ExampleCall, state: State, reshaped: Sequence[StateEntry], *, grad: bool) -> bool:
    """Return whether a first call makes no difference to the next one, which leaves these tensors as they would be.

    Code builds tables or converts weights in its first call (`if self.table.shape[0] < x.shape[1]: ...`).

    Args:
        call: the example call; the module is in the wanted mode.
        state: the module's state; left as it was.
        reshaped: the tensors that the first call leaves in another shape.
        grad: whether gradients are recorded.
    """
    mode: Mode = "function" if call.module is None else "train" if call.module.training else "eval"
    options = {"grad": grad, "seed": 0, "as_traced": True, "outside": True}
    try:
        with attempt("call for real"), eager_run(call, state, mode, **options) as run:
            tree, first = flattened(run(), "output", role="output")
            first = copies(first) + _left(reshaped)
        with attempt("call for real"), eager_run(call, state, mode, **options) as run:
            run.call = with_other_inputs(call)
            run()
            left = _left(reshaped)
            run.call = call
            torch.manual_seed(0)
            other, later = flattened(run(), "output", role="output")
            later = copies(later) + _left(reshaped)
    except ExportFailed:
        return False
    is_kept = all(map(_is_laid_out_alike, left, later[-len(left) :]))
    return is_kept and tree == other and all(map(are_same, first, later))


def _left(entries: Sequence[StateEntry]) -> list[Any]:
    """Return copies of the tensors that are in the places of these now."""
    places = [entry.slots[0] if entry.slots else ({"": entry.tensor}, "") for entry in entries]
    return copies(table.get(key) for table, key in places)


def _is_laid_out_alike(one: Any, other: Any) -> bool:
    tensors = isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor)
    return tensors and (one.dtype, one.shape, one.stride()) == (other.dtype, other.shape, other.stride())
