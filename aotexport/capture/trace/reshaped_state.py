"""State that a call leaves with another shape, dtype or layout: what later calls find, and the refusal."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch import nn

from aotexport.capture.trace.declared_sizes import calls_of_other_sizes
from aotexport.capture.trace.experiments import Found, again, fakes_like
from aotexport.capture.trace.fakes import FakeInputs, is_equal, is_sized_alike
from aotexport.capture.trace.flat_call import FlatCall
from aotexport.eager.python_state import with_other_inputs
from aotexport.eager.run import copies, eager_run
from aotexport.errors import ExportFailed
from aotexport.model.programs import Mode
from aotexport.model.refusals import attempt
from aotexport.model.state import State, StateEntry
from aotexport.model.structure import flattened
from aotexport.torch_internals.general_sizes import symbolic_fake, zero_and_one_symbolic
from aotexport.values.same_tensors import are_same

Reshaped = Sequence[tuple[StateEntry, torch.Tensor]]
"""Entries with tensors like those that a call leaves in their place."""

_SIZE = 11
"""Size at the trace of an axis whose size calls change."""


def refuse_reshaped_state(found: Found) -> None:
    """Refuse state whose shape, dtype or layout calls change, if a later call may do something else for that.

    Raises:
        ExportFailed: names the tensor.
    """
    flat, known = found.flat, found.flat.state.reshaped
    others = [pair for pair in known if all(pair[0] is not entry for entry, _ in flat.reshaped)]
    if not flat.reshaped and not others:
        return
    traced = flat.strategy.is_direct and "layout" not in found.reads
    if not traced or not any(shown(flat, others) for shown in (_is_general, _only_prepares)):
        refuse(flat.reshaped or others)


def _is_general(flat: FlatCall, others: Reshaped) -> bool:
    """Return whether the model does the same whatever the sizes are that calls change: it asks nothing about them.

    `others` are left by other programs.
    """
    with zero_and_one_symbolic(symbolic=True):
        fakes = fakes_like(flat)
        symbols = _put_symbols(fakes, flat.state, [*flat.reshaped, *others])
        return symbols is not None and again(flat, fakes, symbols) is not None


def _put_symbols(fakes: FakeInputs, state: State, reshaped: Reshaped) -> frozenset[Any] | None:
    """Let fakes of state have a symbol for each size that a call changes, and else the geometry that it leaves.

    Returns:
        The symbols; None: a number of axes changes.
    """
    symbols: set[Any] = set()
    for number, (entry, left) in enumerate(reshaped):
        before = entry.tensor.shape
        if len(before) != left.dim():
            return None
        changed = [not is_equal(one, other) for one, other in zip(before, left.shape, strict=True)]
        if not any(changed):
            made = torch.empty_strided(left.shape, left.stride(), dtype=left.dtype, device=entry.tensor.device)
            _put(fakes, state, entry, made, fakes.fake)
            continue
        sizes = [_SIZE + number if moves else size for size, moves in zip(before, changed, strict=True)]
        made = torch.empty(sizes, dtype=left.dtype, device=entry.tensor.device)

        def fake(tensor: torch.Tensor, entry: StateEntry = entry, changed: Sequence[bool] = changed) -> torch.Tensor:
            return symbolic_fake(fakes.mode, tensor, changed, entry.names[0])

        index = _put(fakes, state, entry, made, fake)
        shape = fakes.state[index].shape
        symbols |= {size.node.expr for size in shape if isinstance(size, torch.SymInt)}
    return frozenset(symbols)


def _only_prepares(flat: FlatCall, others: Reshaped) -> bool:
    """Return whether calls make no difference to the next one, which leaves the state as it would without them.

    Code builds tables or converts weights in its first call (`if self.table.shape[0] < x.shape[1]: ...`), or begins
    anew where the size of the batch is another one (`if self.membrane.shape != x.shape: ...`).
    """
    if others:
        return False
    call, reshaped, sizes = flat.call, [entry for entry, _ in flat.reshaped], calls_of_other_sizes(flat.call)
    mode: Mode = "function" if call.module is None else "train" if call.module.training else "eval"
    options = {"grad": flat.grad, "seed": 0, "as_traced": True, "outside": True}
    try:
        with attempt("call for real"), eager_run(call, flat.state, mode, **options) as run:
            tree, first = flattened(run(), "output", role="output")
            first = copies(first) + _left(reshaped)
        with attempt("call for real"), eager_run(call, flat.state, mode, **options) as run:
            for before in (with_other_inputs(call), *sizes):
                run(before)
                left = _left(reshaped)
                torch.manual_seed(0)
                other, later = flattened(run(), "output", role="output")
                later = copies(later) + _left(reshaped)
                kept = any(before is each for each in sizes) or all(map(_is_laid_out_alike, left, later[-len(left) :]))
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


def refuse(reshaped: Reshaped) -> NoReturn:
    """Refuse the calls after the first.

    Raises:
        ExportFailed: names the tensor.
    """
    entry, left = reshaped[0]
    shown = _strides if is_sized_alike(entry.tensor, left) else _text
    raise ExportFailed(
        f"a call turns `{entry.names[0]}` of the model from {shown(entry.tensor)} into {shown(left)}, and the next "
        "call may do something else for that: a bundle's programs hold for one shape. If only the first call does "
        "so, call the model before the export; else give the tensor its greatest size and write into parts of it, or "
        "take it as an argument and return it"
    )


def _put(
    fakes: FakeInputs, state: State, entry: StateEntry, made: torch.Tensor, fake: Callable[[torch.Tensor], torch.Tensor]
) -> int:
    tensor = entry.tensor
    requires_grad = tensor.requires_grad and (made.is_floating_point() or made.is_complex())
    made = nn.Parameter(made, requires_grad) if isinstance(tensor, nn.Parameter) else made.requires_grad_(requires_grad)
    index = next(index for index, each in enumerate(state.entries) if each is entry)
    fakes.state[index] = fake(made)
    return index


def _text(tensor: torch.Tensor) -> str:
    sizes = (str(size) if isinstance(size, int) else "*" for size in tensor.shape)
    return f"{str(tensor.dtype).removeprefix('torch.')}[{', '.join(sizes)}]"


def _strides(tensor: torch.Tensor) -> str:
    return f"strides {tuple(tensor.stride())}" if tensor.layout is torch.strided else str(tensor.layout)
