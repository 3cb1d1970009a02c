"""State of a loaded module that a program reads otherwise than by calling a submodule that changed."""

from __future__ import annotations

from collections.abc import Callable

from aotexport_runtime.call.live_graph import LiveGraph
from aotexport_runtime.errors import NotSupported
from aotexport_runtime.schema.program import Program, StateInput
from aotexport_runtime.submodules.places import StateSlot
from aotexport_runtime.submodules.tables import former_kind, is_sharded
from aotexport_runtime.values import dtypes
from aotexport_runtime.values.subclasses import is_wrapper


def check_state_read(program: Program, live: LiveGraph | None, slot: Callable[[str], StateSlot]) -> None:
    """Refuse state that was replaced by such of another dtype or shape, and that no changed submodule alone reads.

    Args:
        program: its program.
        live: the graph that runs; None: the forward graph.
        slot: returns the slot of a state tensor's current value, by name.

    Raises:
        NotSupported: there is such state.
    """
    for index, spec in enumerate(program.inputs):
        if not isinstance(spec, StateInput) or spec.subclass is not None:
            continue
        if live is not None and live.graph.inputs[index].name not in live.reads:
            continue
        table, key = slot(spec.name)
        if former_kind(table, key) is None:
            continue
        tensor = table[key]
        if is_wrapper(tensor) and not is_sharded(table):
            raise NotSupported(
                f"`{spec.name}` is a `{type(tensor).__name__}` now, and program `{program.name}` was captured with a "
                "plain tensor, which it reads otherwise than by calling a layer. Change the model, and export it again"
            )
        if (dtypes.name_of(tensor.dtype), tuple(tensor.shape)) == (spec.meta.dtype, spec.meta.shape):
            continue
        raise NotSupported(
            f"`{spec.name}` is {dtypes.name_of(tensor.dtype)}{list(tensor.shape)} now, and program "
            f"`{program.name}` was captured with {spec.meta.dtype}{list(spec.meta.shape)}. Put one of that dtype and "
            "shape in its place, replace the whole submodule that reads it, or change the model and export it again"
        )
