"""Refuse calls that give the module's tensors more or less memory: a loaded tensor lies in memory of a fixed size."""

from __future__ import annotations

from typing import Any

import torch

from aotexport.capture.passes.contract import Fact, graph_pass
from aotexport.capture.passes.draft import Draft
from aotexport.errors import ExportFailed
from aotexport.model.source_lines import source_of
from aotexport.torch_internals.names import OpOverload, statically_known_true
from aotexport_runtime.values.subclasses import is_wrapper


@graph_pass(requires=[Fact.TENSORS_ARE_INPUTS])
def refuse_resized_memory(draft: Draft) -> Draft:
    """Refuse to resize the memory of state, unless it has none yet.

    Raises:
        ExportFailed: names the tensor, and the operator with the user's line where one does so.
    """
    placeholders = draft.graph.graph.find_nodes(op="placeholder")
    for node, binding, fake in zip(placeholders, draft.bindings, draft.inputs, strict=True):
        if binding.entry is None or is_wrapper(fake) or fake.layout is not torch.strided:
            continue
        before, after = _extent(fake), node.meta["val"].untyped_storage().nbytes()
        if not statically_known_true(before == 0) and not statically_known_true(after == before):
            cause = _cause(draft.graph, node, before)
            raise ExportFailed(
                f"{_line(cause)}{'a call' if cause is None else f'`{cause.target}`'} changes how much memory "
                f"`{binding.entry.names[0]}` of the model has, which is fixed in a bundle. Assign a new tensor "
                "(`self.name = ...`), or give it its greatest size and write into parts of it"
            )
    return draft


def _cause(graph: torch.fx.GraphModule, placeholder: torch.fx.Node, before: Any) -> torch.fx.Node | None:
    """Return the first operator that writes to the memory of a placeholder and whose result has not room in it."""
    memory = placeholder.meta["val"].untyped_storage()._cdata
    for node in graph.graph.nodes:
        value = node.meta.get("val")
        writes = isinstance(node.target, OpOverload) and node.target._schema.is_mutable
        for each in value if isinstance(value, list | tuple) else [value]:
            own = writes and isinstance(each, torch.Tensor) and each.untyped_storage()._cdata == memory
            if own and not statically_known_true(_extent(each) <= before):
                return node
    return None


def _extent(tensor: torch.Tensor) -> Any:
    """Return the size in bytes of the memory from its begin to the last element of a tensor."""
    if any(statically_known_true(size == 0) for size in tensor.shape):
        return 0
    last: Any = tensor.storage_offset() + 1
    for size, step in zip(tensor.shape, tensor.stride(), strict=True):
        last = last + (size - 1) * step
    return last * tensor.element_size()


def _line(node: torch.fx.Node | None) -> str:
    line = None if node is None else source_of(node.meta.get("stack_trace"), None)
    return f"{line.file}:{line.line}: in {line.function}: " if line else ""
