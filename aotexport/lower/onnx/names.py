"""Names of an ONNX model, those of the program's calling convention, and the provenance of its nodes."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence

import onnx_ir as ir

from aotexport.lower.onnx.provenance import provenance
from aotexport_runtime.schema.program import Program, StateInput
from aotexport_runtime.schema.trees import Leaf
from aotexport_runtime.values.trees import leaves

_STEP = re.compile(r"\[(?:'([^']*)'|\"([^\"]*)\"|(-?\w+))\]")


def input_names(program: Program) -> list[str]:
    """Return a name per input that is no state: its path in the call, `batch['ids'][0]` as `batch.ids.0`."""
    return _unique(_dotted(spec.path) for spec in program.inputs if not isinstance(spec, StateInput))


def output_names(program: Program, taken: Iterable[str]) -> list[str]:
    """Return a name per entry of `program.outputs`: its path in the returned value, or the state that it replaces.

    No output may have a name that is `taken` by an input.
    """
    paths: dict[int, str] = {}
    for path, leaf in leaves(program.output_tree, "output"):
        if isinstance(leaf, Leaf):
            paths.setdefault(leaf.index, _dotted(path))
    for rebind in program.rebinds:
        paths.setdefault(rebind.output_index, rebind.name)
    names = [paths.get(index, f"output.{index}") for index in range(len(program.outputs))]
    fields = [name.removeprefix("output.") for name in names]
    # `output.logits` is called `logits`; bare positions would say nothing.
    short = [name if field.split(".")[0].isdigit() else field for name, field in zip(names, fields, strict=True)]
    return _unique(short, taken)


def update_names(updates: Iterable[str], taken: Iterable[str]) -> list[str]:
    """Return a name per input or state tensor whose value after the call is an output."""
    return _unique((f"{_dotted(name)}.after" for name in updates), taken)


def check_names(count: int, taken: Iterable[str]) -> list[str]:
    """Return a name per output that says whether a check holds."""
    return _unique((f"check.{index}" for index in range(count)), taken)


def finish(
    model: ir.Model,
    inputs: Sequence[str],
    outputs: Sequence[str],
    *,
    reserved: Collection[str],
    state: Mapping[str, str],
) -> None:
    """Name inputs and outputs, keep other values from having such names, and reduce metadata to provenance.

    The model is changed. `inputs` are those that are no state; `reserved` are names of state tensors; `state` are names
    of the inputs for state tensors, which keep their names.
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


def _dotted(path: str) -> str:
    return _STEP.sub(lambda match: "." + next(group for group in match.groups() if group is not None), path)


def _unique(names: Iterable[str], taken: Iterable[str] = ()) -> list[str]:
    seen = set(taken)
    found: list[str] = []
    for name in names:
        candidate, number = name, 1
        while candidate in seen:
            number += 1
            candidate = f"{name}.{number}"
        seen.add(candidate)
        found.append(candidate)
    return found
