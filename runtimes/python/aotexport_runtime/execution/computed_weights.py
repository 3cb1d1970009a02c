"""Linear layers over integers: backward computes their weights again, both times in memory that the thread keeps."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from msgspec.structs import replace

from aotexport_runtime.execution import transforms
from aotexport_runtime.rewrite.names import ENTER_CHECKPOINT, EXIT_CHECKPOINT, KEPT, computed_weights, operands
from aotexport_runtime.schema.graph import Graph, Node
from aotexport_runtime.schema.values import NothingMeta


def with_computed_weights(graph: Graph, nodes: Sequence[Node]) -> list[Node]:
    """Return nodes, each linear layer over integers a checkpointed part: autograd keeps these, and no weight."""
    chains = computed_weights(nodes, {value.name: value.meta for value in graph.inputs})
    by_name, inside = {node.name: node for node in nodes}, {name for chain in chains.values() for name in chain}
    result: list[Node] = []
    for node in nodes:
        if node.name not in chains:
            result += [] if node.name in inside else [node]
            continue
        chain = [by_name[name] for name in chains[node.name]]
        read = dict.fromkeys(name for each in chain for name in operands(each) if name not in inside)
        part = [
            replace(each, op=f"{KEPT}{each.op}", args=[place, *each.args]) if each.op in _INTO else each
            for place, each in enumerate(chain)
        ]
        name, nothing = f"{ENTER_CHECKPOINT} {node.name}", NothingMeta()
        result += [Node(name=name, op=ENTER_CHECKPOINT, args=[[*read], False, True], meta=nothing), *part, node]
        result.append(Node(name=f"{EXIT_CHECKPOINT} {node.name}", op=EXIT_CHECKPOINT, args=[name], meta=nothing))
    return result


# --- the memory -------------------------------------------------------------------------------------------


class _Memory(threading.local):
    """What the largest weight so far was computed in: a tensor per place in the computation and dtype.

    New memory costs more than the computation: the system clears each page of it.
    """

    def __init__(self) -> None:
        self.is_open = False
        self.rooms: dict[tuple[Hashable, torch.dtype], torch.Tensor] = {}

    def room(self, place: Hashable, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return a contiguous tensor with any values, until the next of this place."""
        count, found = torch.Size(shape).numel(), self.rooms.get((place, dtype))
        if found is None or len(found) < count:
            # Tensors of inference mode would be none that other calls write to.
            with torch.inference_mode(False):
                found = self.rooms[place, dtype] = torch.empty(count, dtype=dtype, device="cpu")
        return found[:count].view(shape)


_memory = _Memory()


def in_kept_memory(step: Callable[..., Any], state: Sequence[Any], *others: Any) -> Any:
    """Return `step(*state, *others)`, a layer whose weight is computed of `state` and lives until the call's end."""
    kinds = (torch.Tensor, torch.nn.Parameter)
    is_plain = all(type(each) in kinds and each.device.type == "cpu" and not each.requires_grad for each in state)
    _memory.is_open = is_plain and not (transforms.active() or transforms.watched())
    try:
        return step(*state, *others)
    finally:
        _memory.is_open = False


# --- operators that write to it ---------------------------------------------------------------------------


def into_kept_memory(op: str, operator: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function of a node of `KEPT` and `op`, which calls `operator` where the memory cannot be used."""
    into = _INTO[op]

    def run(place: int, x: Any, *args: Any) -> torch.Tensor:
        parts: Sequence[torch.Tensor] = x if isinstance(x, list) else (x,)
        is_ours = _memory.is_open and all(map(torch.Tensor.is_contiguous, parts))
        return into(place, x, *args) if is_ours else operator(x, *args)

    return run


def _shifted(shift: Any) -> Callable[..., torch.Tensor]:
    def run(place: int, x: torch.Tensor, count: int) -> torch.Tensor:
        return shift(x, count, out=_memory.room(place, x.shape, x.dtype))

    return run


def _cast(place: int, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    return _memory.room(place, x.shape, other.dtype).copy_(x)


def _stacked(place: int, tensors: Sequence[torch.Tensor], dim: int) -> torch.Tensor:
    if dim != -1 or [each.dtype for each in tensors] != [torch.int8] * 2:
        return torch.stack([*tensors], dim)
    # Pairs of bytes are written as one integer, many times as fast.
    low, high = tensors if sys.byteorder == "little" else reversed(tensors)
    pairs, lower = (_memory.room((place, part), low.shape, torch.int16) for part in range(2))
    pairs.copy_(high).bitwise_left_shift_(8).bitwise_or_(lower.copy_(low).bitwise_and_(0xFF))
    return pairs.view(torch.int8).view(*low.shape, 2)


_INTO: dict[str, Callable[..., torch.Tensor]] = {
    "aten::__lshift__.Scalar": _shifted(torch.bitwise_left_shift),
    "aten::__rshift__.Scalar": _shifted(torch.bitwise_right_shift),
    "aten::stack.default": _stacked,
    "aten::type_as.default": _cast,
}
