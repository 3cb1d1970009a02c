"""Compare the side effects in the captures of two strategies: the direct trace shows all, others may lose some."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from aotexport.capture.trace.forward_capture import ForwardCapture
from aotexport.errors import ExportFailed
from aotexport.torch_internals.names import SET_GRAD_ENABLED


def check_nothing_lost(direct: ForwardCapture, other: ForwardCapture) -> None:
    """Refuse a capture that lacks an effect of the direct one, which holds for fewer sizes and is not used.

    Raises:
        ExportFailed: it lacks one.
    """
    for effect in set(_effects(direct)) - set(_effects(other)):
        raise ExportFailed(f"{effect} would be lost")


def _effects(capture: ForwardCapture) -> Iterator[str]:
    for entry, _ in capture.rebinds:
        yield f"the new tensor for `{entry.names[0]}`"
    for change in capture.container_changes:
        yield f"the change of `{change.path}`"
    if _leaves_gradients_off(capture.graph.graph):
        yield "the grad mode that the call leaves"


def _leaves_gradients_off(graph: torch.fx.Graph) -> bool:
    switches = list(graph.find_nodes(op="call_function", target=SET_GRAD_ENABLED))
    return bool(switches) and switches[-1].args[0] is False
