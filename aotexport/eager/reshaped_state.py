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


def only_prepares(
    call: ExampleCall, others: Sequence[ExampleCall], state: State, reshaped: Sequence[StateEntry], *, grad: bool
) -> bool:
    """Return whether calls make no difference to the next one, which leaves these tensors as it would without them.

    Code builds tables or converts weights in its first call (`if self.table.shape[0] < x.shape[1]: ...`), or begins
    anew where the size of the batch is another one (`if self.membrane.shape != x.shape: ...`).

    Args:
        call: the example call; the module is in the wanted mode.
        others: calls of other sizes to make before it.
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
            for before in (with_other_inputs(call), *others):
                run.call = before
                run()
                left = _left(reshaped)
                run.call = call
                torch.manual_seed(0)
                other, later = flattened(run(), "output", role="output")
                later = copies(later) + _left(reshaped)
                kept = any(before is each for each in others) or all(map(_is_laid_out_alike, left, later[-len(left) :]))
                if not kept or tree != other or not all(map(are_same, first, later)):
                    return False
    except ExportFailed:
        return False
    return True


def _left(entries: Sequence[StateEntry]) -> list[Any]:
    """Return copies of the tensors that are in the places of these now."""
    places = [entry.slots[0] if entry.slots else ({"": entry.tensor}, "") for entry in entries]
    return copies(table.get(key) for table, key in places)


def _is_laid_out_alike(one: Any, other: Any) -> bool:
    tensors = isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor)
    return tensors and (one.dtype, one.shape, one.stride()) == (other.dtype, other.shape, other.stride())
