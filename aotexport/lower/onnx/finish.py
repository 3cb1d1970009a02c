"""The final names of an ONNX model, and the provenance of its nodes."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import onnx_ir as ir

from aotexport.lower.onnx.provenance import provenance


def finish(
    model: ir.Model,
    inputs: Sequence[str],
    outputs: Sequence[str],
    *,
    reserved: Collection[str],
    state: Mapping[str, str],
) -> None:
    """Name inputs and outputs, keep other values from having such names, and reduce metadata to provenance.

    Args:
        model: changed in place.
        inputs: names of the inputs that are no state, in order.
        outputs: names of the outputs, in order.
        reserved: names of state tensors.
        state: names of the inputs for state tensors; they keep their names.
    """
    graph = model.graph
    graph.name = "main"
    own = {*inputs, *outputs, *reserved}
    for node in graph.all_nodes():
        _keep_provenance(node)
        for value in node.outputs:
            _clear(value, own)
    for value in [*graph.inputs, *graph.initializers.values()]:
        if value.name not in state:
            _clear(value, own)
    arguments = [value for value in graph.inputs if value.name not in state]
    for value, name in zip(arguments, inputs, strict=True):
        value.name = name
    for value, name in zip(graph.outputs, outputs, strict=True):
        value.name = name
    graph.metadata_props.clear()


def _clear(value: ir.Value, own: Collection[str]) -> None:
    value.metadata_props.clear()
    if value.name in own:
        value.name = f"{value.name}:value"


def _keep_provenance(node: ir.Node) -> None:
    found = provenance(node.metadata_props.get("pkg.torch.onnx.stack_trace"))
    node.doc_string = None
    node.metadata_props.clear()
    node.metadata_props.update({f"aotexport.{key}": value for key, value in found.items()})
