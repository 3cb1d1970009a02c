"""Results that share memory with inputs, where the calling convention needs memory of their own.

The compiler drops copies that seem needless: it does not know that the epilogue of a call, or the caller, may write to
inputs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import msgspec

from aotexport_runtime.allowed.operators import VIEWS
from aotexport_runtime.schema.graph import Graph, Node
from aotexport_runtime.schema.program import FreshOutput, FunctionalGraph
from aotexport_runtime.schema.values import Argument, DeviceArgument, DTypeArgument, SizeArgument, TensorMeta

_SHARING = VIEWS | {"chunk", "contiguous", "getitem", "split", "split_with_sizes", "unbind"}
"""Base names of operators whose results share memory with their first argument, or may."""


def unshared(graph: Graph, functional: Graph, convention: FunctionalGraph) -> Graph:
    """Return a lowered forward with copies of results that must not share memory with an input.

    These are fresh outputs and intermediate bases, unless the functional graph returns memory of that input, too: views
    that one operator makes together, or a custom autograd function. And they are saved tensors and new contents of
    inputs, where the call changes the input that they share memory with, unless these are its new metadata.

    Args:
        graph: a lowered forward.
        functional: the functional graph that it stands for.
        convention: its calling convention, with the versions that the call raises.
    """
    bases, shared = _bases(graph), _bases(functional)
    changed = {change.input_index for change in (*convention.mutations, *convention.version_rises)}
    returned = len(convention.mutations) + len(convention.outputs) + convention.intermediate_bases
    nodes, outputs = list(graph.nodes), list[Argument]()
    for index, output in enumerate(graph.outputs):
        if isinstance(output, str) and output in bases:
            base = bases[output]
            if index < len(convention.mutations):
                mutation = convention.mutations[index]
                is_copied = base in changed and (mutation.data or mutation.input_index != base)
            elif index < returned:
                own = functional.outputs[index]
                is_copied = _is_own(index, convention) and not (isinstance(own, str) and shared.get(own) == base)
            else:
                is_copied = base in changed
            if is_copied:
                nodes += _copy(graph, output, index)
                output = nodes[-1].name
        outputs.append(output)
    return msgspec.structs.replace(graph, nodes=tuple(nodes), outputs=outputs)


def _is_own(index: int, convention: FunctionalGraph) -> bool:
    """Return whether an output or intermediate base has memory of its own by the calling convention."""
    place = index - len(convention.mutations)
    return place >= len(convention.outputs) or isinstance(convention.outputs[place], FreshOutput)


def _bases(graph: Graph) -> Mapping[str, int]:
    """Return, per input and view of an input, the index of that input."""
    bases = {value.name: index for index, value in enumerate(graph.inputs)}
    for node in graph.nodes:
        base = node.op.partition("::")[2].partition(".")[0]
        if base in _SHARING and node.args and isinstance(node.args[0], str) and node.args[0] in bases:
            bases[node.name] = bases[node.args[0]]
    return bases


def _copy(graph: Graph, name: str, index: int) -> Iterator[Node]:
    """Yield the nodes of a copy laid out as the value is, gaps in its memory included."""
    meta = next(value.meta for value in (*graph.inputs, *graph.nodes) if value.name == name)
    assert isinstance(meta, TensorMeta)
    copied = f"{name}:own:{index}"
    if not _has_gaps(meta):
        yield Node(name=copied, op="aten::clone.default", args=[name], meta=meta)
        return
    place = f"{copied}:place"
    layout: list[Argument] = [
        [size if isinstance(size, int) else SizeArgument(value=size) for size in sizes]
        for sizes in (meta.shape, meta.stride)
    ]
    kwargs: dict[str, Argument] = {"dtype": DTypeArgument(value=meta.dtype), "device": DeviceArgument(type="cuda")}
    yield Node(name=place, op="aten::empty_strided.default", args=layout, kwargs=kwargs, meta=meta)
    yield Node(name=copied, op="aten::copy_.default", args=[place, name], meta=meta)


def _has_gaps(meta: TensorMeta) -> bool:
    """Return whether a value of known sizes does not fill its memory, so that `clone` would lay it out otherwise."""
    steps = sorted((step, size) for step, size in zip(meta.stride, meta.shape, strict=True) if _is_wide(step, size))
    expected = 1
    for step, size in steps:
        if step != expected:
            return step > expected
        expected *= size
    return False


def _is_wide(step: object, size: object) -> bool:
    return isinstance(step, int) and isinstance(size, int) and size > 1
