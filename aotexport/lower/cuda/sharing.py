"""Results that share memory with inputs, where the calling convention needs memory of their own.

The compiler drops copies that seem needless: it does not know that the epilogue of a call, or the caller, may write to
inputs.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import msgspec

from aotexport_runtime.schema.graph import Graph, Node
from aotexport_runtime.schema.program import FreshOutput, FunctionalGraph
from aotexport_runtime.schema.values import Argument

_VIEWS = ("aten::as_strided.default", "aten::slice.Tensor", "aten::contiguous.default")


def unshared(graph: Graph, convention: FunctionalGraph) -> Graph:
    """Return a lowered forward with copies of results that must not share memory with an input.

    These are fresh outputs and intermediate bases, for every input; and saved tensors and the new contents of changed
    inputs, for inputs that the call changes.

    Args:
        graph: a lowered forward.
        convention: its calling convention.
    """
    inputs = [value.name for value in graph.inputs]
    bases = _bases(graph, set(inputs))
    changed = {inputs[mutation.input_index] for mutation in convention.mutations}
    returned = len(convention.mutations) + len(convention.outputs) + convention.intermediate_bases
    nodes = list(graph.nodes)
    outputs: list[Argument] = []
    for index, output in enumerate(graph.outputs):
        base = bases.get(output) if isinstance(output, str) else None
        late = index >= returned or index < len(convention.mutations)
        if base is not None and (base in changed if late else _is_own(index, convention)):
            assert isinstance(output, str)
            nodes.append(_copy(graph, output, index))
            output = nodes[-1].name
        outputs.append(output)
    return msgspec.structs.replace(graph, nodes=tuple(nodes), outputs=outputs)


def _is_own(index: int, convention: FunctionalGraph) -> bool:
    """Return whether an output or intermediate base has memory of its own by the calling convention."""
    place = index - len(convention.mutations)
    return place >= len(convention.outputs) or isinstance(convention.outputs[place], FreshOutput)


def _bases(graph: Graph, inputs: Collection[str]) -> Mapping[str, str]:
    """Return, per input and view of an input, the name of that input."""
    bases = {name: name for name in inputs}
    for node in graph.nodes:
        if node.op in _VIEWS and node.args and isinstance(node.args[0], str) and node.args[0] in bases:
            bases[node.name] = bases[node.args[0]]
    return bases


def _copy(graph: Graph, name: str, index: int) -> Node:
    metas = {value.name: value.meta for value in (*graph.inputs, *graph.nodes)}
    return Node(name=f"{name}:own:{index}", op="aten::clone.default", args=[name], meta=metas[name])
