"""Whether a custom autograd function does more than leave out the gradients that are not needed.

If it does not, one graph with all gradients serves every call.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

import torch
from torch.fx.node import map_arg

from aotexport.errors import ExportFailed
from aotexport.model.refusals import attempt
from aotexport.torch_internals.calls import memory_of, tensors_in
from aotexport.torch_internals.outside import fresh_symbols_dropped

_MAX_READ = 4
"""The largest number of inputs to compare all patterns for."""


class NeededGradients(Sequence[bool]):
    """`ctx.needs_input_grad`, which knows the inputs that it was read for."""

    def __init__(self, needed: Iterable[bool]) -> None:
        self._needed = tuple(needed)
        self.some = any(self._needed)
        self.read = set[int]()

    def __len__(self) -> int:
        return len(self._needed)

    def __getitem__(self, index: Any) -> Any:
        found = range(len(self))[index]
        self.read.update([found] if isinstance(found, int) else found)
        return self._needed[index]


def dependence(
    trace: Callable[[NeededGradients], torch.fx.GraphModule], inputs: Sequence[Any], count: int, read: Iterable[int]
) -> Literal["outputs", "gradients"] | None:
    """Return what depends on which gradients are needed; None: a function only leaves out the others.

    Args:
        trace: returns a graph of outputs, and of gradients of all inputs that are tensors, one after the other: each
            for some pattern of defined gradients, none if none is needed.
        inputs: of the function.
        count: number of outputs.
        read: the inputs for which it reads whether their gradient is needed, if all are.
    """
    places = [i for i, arg in enumerate(inputs) if isinstance(arg, torch.Tensor)]
    has_gradient = [is_differentiable(arg) for arg in inputs]
    asked = [index for index in read if has_gradient[index]]
    if len(asked) > _MAX_READ:
        return "outputs"
    depends: Literal["gradients"] | None = None
    with fresh_symbols_dropped():
        try:
            with attempt("custom autograd function"):
                whole = trace(NeededGradients(has_gradient))
                for answers in itertools.product((True, False), repeat=len(asked)):
                    wanted = {**dict(enumerate(has_gradient)), **dict(zip(asked, answers, strict=True))}
                    other = trace(NeededGradients(wanted.values()))
                    outputs, gradients = [True] * count, [wanted[place] for place in places]
                    if _steps(whole, outputs) != _steps(other, outputs):
                        return "outputs"
                    compared = outputs + gradients * ((len(_results(other)) - count) // len(places))
                    if _steps(whole, compared) != _steps(other, compared):
                        depends = "gradients"
        except ExportFailed:
            return "outputs"
    return depends


def is_differentiable(value: Any) -> bool:
    """Return whether a value can have a gradient."""
    return isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex())


def _results(graph: torch.fx.GraphModule) -> Sequence[Any]:
    return graph.graph.output_node().args[0]  # type: ignore[return-value]


def _steps(graph: torch.fx.GraphModule, wanted: Iterable[bool]) -> Any:
    """Return what a graph does for some of its first results, for comparison."""
    results = [result for result, wants in zip(_results(graph), wanted, strict=False) if wants]
    live = {result for result in results if isinstance(result, torch.fx.Node)}
    while True:
        memory = {
            each for node in graph.graph.nodes if node in live or node.op == "placeholder" for each in _memories(node)
        }
        before = len(live)
        for node in reversed(graph.graph.nodes):
            writes = node.op == "call_function" and node.is_impure()
            written = {each for operand in node.all_input_nodes for each in _memories(operand)}
            if node in live or (writes and (not written or not written.isdisjoint(memory))):
                live |= {node, *node.all_input_nodes}
        if len(live) == before:
            break
    numbers: dict[torch.fx.Node, str] = {}
    steps: list[Any] = []
    for node in graph.graph.nodes:
        if node.op == "placeholder" or node in live:
            numbers[node] = f"%{len(numbers)}"
            target = _attribute(graph, str(node.target)) if node.op == "get_attr" else node.target
            named = node.op != "placeholder" and (target, map_arg((node.args, node.kwargs), numbers.get))
            steps.append(named)
    return steps, [numbers[each] if isinstance(each, torch.fx.Node) else each for each in results]


def _attribute(graph: torch.fx.GraphModule, name: str) -> Any:
    """Return an attribute for comparison: what a subgraph does, any other by its identity."""
    value = getattr(graph, name)
    return _steps(value, itertools.repeat(True)) if isinstance(value, torch.fx.GraphModule) else id(value)


def _memories(node: torch.fx.Node) -> list[int]:
    return list(map(memory_of, tensors_in(node.meta.get("val"))))
