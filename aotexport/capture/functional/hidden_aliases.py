"""Operators whose results share memory with their arguments, although their schema says that they do not.

`unsafe_chunk`, `unsafe_split` and `_unsafe_view` promise that nobody writes to one of the two. Code that does so
nevertheless changes both in eager; functional graphs go by the schema, and would lose the other change.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.fx.node import map_arg
from torch.utils._python_dispatch import TorchDispatchMode

from aotexport.torch_internals.calls import tree_leaves
from aotexport.torch_internals.names import OpOverload


def written_hidden_alias(graph: torch.fx.Graph) -> str | None:
    """Return an operator whose hidden alias is written to, and its argument used later; None: there is none."""
    places = {node: place for place, node in enumerate(graph.nodes)}
    nodes = [node for node in graph.nodes if isinstance(node.target, OpOverload)]
    written = {memory for node in nodes for memory in _written(node)}
    for node in nodes if written else ():
        given = [source.meta.get("val") for source in node.all_input_nodes]
        shared = written & _hidden(node.target, given, node.meta.get("val"))
        if shared and _is_used_later(node, shared, places) and _is_hidden_within(node):
            return str(node.target)
    return None


def _is_used_later(node: torch.fx.Node, memory: set[int], places: Mapping[torch.fx.Node, int]) -> bool:
    """Return whether what had this memory before the node is used after it, or by the caller."""
    before = [each for each in places if places[each] < places[node] and memory & _memories([each.meta.get("val")])]
    later = (places[user] > places[node] for each in before for user in each.users)
    return any(each.op != "call_function" for each in before) or any(later)


def _written(node: torch.fx.Node) -> set[int]:
    """Return the memory that an operator writes to."""
    target: Any = node.target
    if not target._schema.is_mutable:
        return set()
    arguments = target._schema.arguments
    given = {argument.name: value for argument, value in zip(arguments, node.args, strict=False)} | node.kwargs
    writes = [argument.name for argument in arguments if argument.alias_info and argument.alias_info.is_write]
    nodes = [value for name in writes for value in tree_leaves(given.get(name)) if isinstance(value, torch.fx.Node)]
    return _memories(value.meta.get("val") for value in nodes)


def _hidden(target: Any, given: Iterable[Any], results: Any) -> set[int]:
    """Return the memory that results of an operator share with arguments, and should not by its schema."""
    returns = target._schema.returns
    listed = results if isinstance(results, list | tuple) and len(returns) > 1 else [results]
    unknown = [value for value, declared in zip(listed, returns, strict=False) if declared.alias_info is None]
    return _memories(unknown) & _memories(given)


def _memories(values: Iterable[Any]) -> set[int]:
    tensors = (leaf for value in values for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor))
    return {tensor.untyped_storage()._cdata for tensor in tensors if tensor.layout is torch.strided}


class _Within(TorchDispatchMode):
    """Tell whether an operator that others make up has a hidden alias below autograd."""

    def __init__(self) -> None:
        super().__init__()
        self.found = False

    def __torch_dispatch__(
        self, func: Any, types: Sequence[Any], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        self.found = self.found or bool(_hidden(func, [args, kwargs], result))
        return result


def _is_hidden_within(node: torch.fx.Node) -> bool:
    """Return whether functional graphs do not see the alias either: they take composite operators apart."""
    target: Any = node.target
    args, kwargs = map_arg((node.args, dict(node.kwargs)), lambda taken: taken.meta["val"])
    with torch.no_grad(), _Within() as within:
        target(*args, **kwargs)
    return within.found
