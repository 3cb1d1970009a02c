"""Results that share memory with inputs, where the calling convention needs memory of their own.

The compiler drops copies that seem needless: it does not know that the epilogue of a call, or the caller, may write to
inputs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from msgspec.structs import replace

from aotexport_runtime.allowed.operators import VIEWS
from aotexport_runtime.schema.graph import Graph, Node
from aotexport_runtime.schema.program import FreshOutput, FunctionalGraph
from aotexport_runtime.schema.sizes import SizeExpression
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
    return replace(graph, nodes=tuple(nodes), outputs=outputs)


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
    """Yield the nodes of a copy with the strides of the value, also where these leave gaps or repeat elements."""
    meta = next(value.meta for value in (*graph.inputs, *graph.nodes) if value.name == name)
    assert isinstance(meta, TensorMeta)
    copied, place, stride = f"{name}:own:{index}", f"{name}:place:{index}", _sizes(meta.stride)
    once = replace(meta, shape=tuple([1 if step == 0 else n for n, step in zip(meta.shape, meta.stride, strict=True)]))
    kwargs: dict[str, Argument] = {"dtype": DTypeArgument(value=meta.dtype), "device": DeviceArgument(type="cuda")}
    sizes = [_sizes(once.shape), stride]
    yield Node(name=place, op="aten::empty_strided.default", args=[*sizes], kwargs=kwargs, meta=once)
    if once == meta:
        yield Node(name=copied, op="aten::copy_.default", args=[place, name], meta=meta)
        return
    first, written = f"{name}:first:{index}", f"{name}:written:{index}"
    yield Node(name=first, op="aten::as_strided.default", args=[name, *sizes], meta=once)
    yield Node(name=written, op="aten::copy_.default", args=[place, first], meta=once)
    yield Node(name=copied, op="aten::as_strided.default", args=[written, _sizes(meta.shape), stride], meta=meta)


def _sizes(sizes: Iterable[int | SizeExpression | str]) -> list[Argument]:
    return [size if isinstance(size, int) else SizeArgument(value=size) for size in sizes]
