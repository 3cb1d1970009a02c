"""A draft as text, to follow a graph through the passes.

    reads grad_mode
    %x : float32[2, 3] = argument 0
    %weight : float32[3, 3] requires_grad = state linear.weight
    %mm : float32[2, 3] = aten.mm.default(%x, %weight)
    return %mm

A subgraph is printed, indented, below the attribute that holds it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from aotexport.capture.passes.draft import Draft
from aotexport.capture.trace.forward_capture import Binding
from aotexport.torch_internals.names import HigherOrderOperator, OpOverload


def draft_text(draft: Draft) -> str:
    """Return a draft as lines of text."""
    reads = [f"reads {' '.join(sorted(draft.reads))}"] if draft.reads else []
    inputs = [
        f"%{node.name}{_typed(value)}{' requires_grad' * _requires_grad(value)} = {_binding(binding)}"
        for node, binding, value in zip(
            draft.graph.graph.find_nodes(op="placeholder"), draft.bindings, draft.inputs, strict=True
        )
    ]
    return "\n".join([*reads, *inputs, *_nodes(draft.graph)]) + "\n"


def _binding(binding: Binding) -> str:
    state = [f"state {binding.entry.names[0]}"] if binding.entry is not None else []
    argument = [f"argument {binding.argument}"] if binding.argument is not None else []
    return " and ".join([*state, *argument]) + " differentiated" * binding.is_differentiated


def _nodes(module: torch.fx.GraphModule) -> Iterator[str]:
    """Yield the lines of the nodes behind the placeholders."""
    for node in module.graph.nodes:
        if node.op == "output":
            yield f"return {', '.join(map(_value, node.args[0]))}"
        elif node.op == "get_attr":
            yield f"%{node.name}{_typed(node.meta.get('val'))} = attribute {node.target}"
            subgraph = getattr(module, str(node.target), None)
            if isinstance(subgraph, torch.fx.GraphModule):
                taken = [
                    f"%{each.name}{_typed(each.meta.get('val'))}"
                    for each in subgraph.graph.find_nodes(op="placeholder")
                ]
                yield from (f"    {line}" for line in [*taken, *_nodes(subgraph)])
        elif node.op != "placeholder":
            values = [*map(_value, node.args), *(f"{name}={_value(value)}" for name, value in node.kwargs.items())]
            custom = node.meta.get("custom") or {}
            marks = "".join(f" #{name}" for name, value in custom.items() if value is True and name[0] != "_")
            yield f"%{node.name}{_typed(node.meta.get('val'))} = {_target(node)}({', '.join(values)}){marks}"


def _target(node: torch.fx.Node) -> str:
    if isinstance(node.target, str | OpOverload):
        return str(node.target)
    if isinstance(node.target, HigherOrderOperator):
        return f"higher_order.{node.target.name()}"
    return f"{node.target.__module__}.{node.target.__qualname__}"  # type: ignore[union-attr]


def _value(value: Any) -> str:
    if isinstance(value, torch.fx.Node):
        return f"%{value.name}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_value, value))}]"
    return str(value) if isinstance(value, torch.dtype | torch.layout | torch.memory_format) else repr(value)


def _typed(value: Any) -> str:
    return "" if value is None or isinstance(value, torch.fx.GraphModule) else f" : {_type(value)}"


def _type(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}[{', '.join(map(str, value.shape))}]"
    if isinstance(value, list | tuple):
        return f"({', '.join(map(_type, value))})"
    return f"{type(value).__name__} {value}"


def _requires_grad(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad
