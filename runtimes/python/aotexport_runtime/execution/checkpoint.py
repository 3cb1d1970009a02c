"""Checkpointed parts of forward graphs: backward recomputes their saved tensors, from the current values of inputs.

Torch's own (`torch.utils.checkpoint`) imports its compiler.
Source: torch 2.13, `torch/utils/checkpoint.py`, `_checkpoint_without_reentrant_generator`, `_checkpoint_hook`.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import torch
from torch.autograd.graph import saved_tensors_hooks

from aotexport_runtime.execution.autocast import autocast_of_now, draws_of_now
from aotexport_runtime.rewrite.names import (
    ENTER_CHECKPOINT,
    EXIT_CHECKPOINT,
    FLOATS,
    computed_weights,
    names_in,
    operands,
)
from aotexport_runtime.schema.graph import Graph, GraphInput, Node
from aotexport_runtime.schema.values import Argument, NothingMeta, SequenceMeta, SubgraphArgument, ValueMeta
from aotexport_runtime.validate.arguments import references

# --- parts as higher-order operators -----------------------------------------------------------------------


def outlined(graph: Graph, nodes: Sequence[Node], outputs: Sequence[Argument]) -> tuple[Graph, list[Node]]:
    """Return nodes, each checkpointed part one `higher_order::checkpoint`, and a graph with their subgraphs."""
    metas: dict[str, ValueMeta] = {value.name: value.meta for value in (*graph.inputs, *graph.nodes)}
    subgraphs: dict[str, Graph] = {}
    result: list[Node] = []
    begin = 0
    while begin < len(nodes):
        enter = nodes[begin]
        end = begin
        if enter.op != ENTER_CHECKPOINT:
            result.append(enter)
        else:
            end = next(
                i for i in range(begin, len(nodes)) if nodes[i].op == EXIT_CHECKPOINT and nodes[i].args[0] == enter.name
            )
            inner = nodes[begin + 1 : end]
            used = set(names_in(outputs)).union(*map(operands, nodes[end + 1 :]))
            returned = [node.name for node in inner if node.name in used]
            arguments = list(dict.fromkeys(references(enter.args[0])))
            read = set[str]().union(*map(operands, inner)).difference(arguments, (node.name for node in inner))
            others = [name for name in metas if name in read]
            name = f"checkpoint {enter.name}"
            inputs = tuple(GraphInput(name=each, meta=metas[each]) for each in (*arguments, *others))
            subgraphs[name] = msgspec.structs.replace(graph, inputs=inputs, nodes=tuple(inner), outputs=[*returned])
            args: list[Argument] = [SubgraphArgument(name=name), [*arguments], [*others], enter.args[1]]
            meta = SequenceMeta(items=tuple(metas[each] for each in returned))
            result.append(Node(name=enter.name, op="higher_order::checkpoint", args=args, meta=meta))
            result += [
                Node(name=each, op="python::getitem", args=[enter.name, place], meta=metas[each])
                for place, each in enumerate(returned)
            ]
        begin = end + 1
    return msgspec.structs.replace(graph, subgraphs={**graph.subgraphs, **subgraphs}), result


def with_computed_weights(graph: Graph, nodes: Sequence[Node]) -> list[Node]:
    """Return nodes, each linear layer over integers a checkpointed part: autograd keeps these, and no weight."""
    chains = computed_weights(nodes, {value.name: value.meta for value in graph.inputs})
    by_name, inside = {node.name: node for node in nodes}, {name for chain in chains.values() for name in chain}
    result: list[Node] = []
    for node in nodes:
        if node.name not in chains:
            result += [] if node.name in inside else [node]
            continue
        part = [*(by_name[name] for name in chains[node.name]), node]
        part = [
            msgspec.structs.replace(each, op=FLOATS) if each.op == "aten::type_as.default" else each for each in part
        ]
        made = {each.name for each in part}
        read = [name for name in dict.fromkeys(name for each in part for name in operands(each)) if name not in made]
        name = f"{ENTER_CHECKPOINT} {node.name}"
        nothing = NothingMeta()
        result += [Node(name=name, op=ENTER_CHECKPOINT, args=[[*read], False], meta=nothing), *part]
        result.append(Node(name=f"{EXIT_CHECKPOINT} {node.name}", op=EXIT_CHECKPOINT, args=[name], meta=nothing))
    return result


# --- weights that layers compute of integers ------------------------------------------------------------------


class _Spare(threading.local):
    """Memory of a thread for the weight of one layer after the other."""

    numbers = torch.empty(0)


_SPARE = _Spare()


def floats(integers: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return `integers.type_as(like)`, in memory that the next call in this thread writes over.

    New memory of that size would be mapped in each call, or leave holes between what lives.
    """
    is_turned = integers.dim() == 2 and not integers.is_contiguous()
    rows = integers.t() if is_turned else integers
    is_plain = type(integers) in (torch.Tensor, torch.nn.Parameter) and integers.device.type == "cpu"
    if not is_plain or not rows.is_contiguous() or like.requires_grad:
        return integers.type_as(like)
    if _SPARE.numbers.numel() < integers.numel() or _SPARE.numbers.dtype != like.dtype:
        with torch.inference_mode(False):
            _SPARE.numbers = torch.empty(integers.numel(), dtype=like.dtype)
    made = _SPARE.numbers[: integers.numel()].view(rows.shape).copy_(rows)
    return made.t() if is_turned else made


# --- running them -----------------------------------------------------------------------------------------


def checkpoint(
    step: Callable[..., tuple[Any, ...]], arguments: Sequence[Any], others: Sequence[Any], repeats_draws: bool
) -> tuple[Any, ...]:
    """Run a checkpointed part, which takes `arguments`, then `others`.

    Backward raises where one of `arguments` was changed in place since. `repeats_draws`: it draws the random numbers of
    this call again.
    """
    if not torch.is_grad_enabled():
        return step(*arguments, *others)
    part = _Part(lambda: step(*arguments, *others), arguments, repeats_draws)
    with saved_tensors_hooks(part.pack, part.unpack):
        return step(*arguments, *others)


class _Enough(Exception):
    """All saved tensors are recomputed."""


class _Part:
    """A checkpointed part that ran; lives as long as autograd's graph holds its saved tensors."""

    def __init__(self, run: Callable[[], Any], arguments: Sequence[Any], repeats_draws: bool) -> None:
        self._run = run
        self._versions = [(tensor, tensor._version) for tensor in arguments if not tensor.is_inference()]
        self._draws = draws_of_now(arguments) if repeats_draws else contextlib.nullcontext
        self._autocasts = [autocast_of_now(type_) for type_ in {"cpu", *(tensor.device.type for tensor in arguments)}]
        self._count = 0
        self._pass = -1
        self._anew: dict[int, torch.Tensor] = {}

    def pack(self, tensor: torch.Tensor) -> int:
        """Return the position of a tensor among the saved ones; autograd saves it in place of the tensor."""
        self._count += 1
        return self._count - 1

    def unpack(self, place: int) -> torch.Tensor:
        """Return the saved tensor at a position, recomputed once per backward pass."""
        # Torch says by no public name which pass runs.
        current: int = torch._C._current_graph_task_id()  # noqa: TID251
        if current == -1 or current != self._pass or place not in self._anew:
            self._pass, self._anew = current, dict(enumerate(self._saved_again()))
        # Backward reads each once.
        return self._anew.pop(place)

    def _saved_again(self) -> list[torch.Tensor]:
        for tensor, version in self._versions:
            if tensor._version != version:
                raise RuntimeError(
                    "one of the variables needed for gradient computation has been modified by an inplace operation: "
                    f"an argument of a checkpointed part, of shape {list(tensor.shape)}, is at version "
                    f"{tensor._version}; expected version {version} instead"
                )
        if torch.is_grad_enabled():
            _SPARE.numbers = torch.empty(0)  # Another backward pass reads the weight of this one.
        found: list[torch.Tensor] = []

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            found.append(tensor.detach())
            if len(found) == self._count:
                raise _Enough
            return found[-1]

        with contextlib.suppress(_Enough), contextlib.ExitStack() as around:
            for context in (self._draws, *self._autocasts, torch.enable_grad):
                around.enter_context(context())
            around.enter_context(saved_tensors_hooks(pack, lambda tensor: tensor))
            self._run()
        return found
