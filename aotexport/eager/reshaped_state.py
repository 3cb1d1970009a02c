"""Whether a call that changes the shape of the module's tensors matters to later calls, by calls for real."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from aotexport.eager.python_state import with_other_inputs
from aotexport.eager.run import Run, eager_run
from aotexport.errors import ExportFailed
from aotexport.model.call import ExampleCall
from aotexport.model.mode import Mode
from aotexport.model.refusals import attempt
from aotexport.model.state import State, StateEntry
from aotexport.model.structure import tree_of
from aotexport.values.same_tensors import are_same


def only_prepares(call: ExampleCall, state: State, reshaped: Sequence[StateEntry], *, grad: bool) -> bool:
    """Return whether a first call makes no difference to the next one, which leaves these tensors as it finds them.

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
            tree, first = _result(run)
        with attempt("call for real"), eager_run(call, state, mode, **options) as run:
            run.call = with_other_inputs(call)
            run()
            left = _geometry(reshaped)
            run.call = call
            torch.manual_seed(0)
            other, later = _result(run)
            is_kept = left == _geometry(reshaped)
    except ExportFailed:
        return False
    return is_kept and tree == other and all(map(are_same, first, later))


def _result(run: Run) -> tuple[Any, list[Any]]:
    values: list[Any] = []

    def keep(value: Any, path: str) -> int:
        values.append(value.detach().clone() if isinstance(value, torch.Tensor) else value)
        return len(values) - 1

    return tree_of(run(), "output", keep, role="output"), values


def _geometry(entries: Sequence[StateEntry]) -> list[Any]:
    tensors = [entry.slots[0][0].get(entry.slots[0][1]) for entry in entries]
    return [(each.dtype, each.shape, each.stride()) if isinstance(each, torch.Tensor) else each for each in tensors]
