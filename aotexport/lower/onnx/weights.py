"""Names of an ONNX model, the provenance of its nodes, and its initialisers in the bundle's safetensors files."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from aotexport.lower.onnx.rebuild import provenance
from aotexport.write.weights import tensor_ranges
from aotexport_runtime.schema.manifest import StateTensor, StoredPart
from aotexport_runtime.schema.program import Program, StateInput
from aotexport_runtime.schema.trees import Leaf
from aotexport_runtime.values.trees import leaves


def attach_state(
    model: ir.Model,
    state: Mapping[str, str],
    entries: Mapping[str, StateTensor | StoredPart],
    root: Path,
    *,
    changing: Collection[str] = (),
) -> dict[str, str]:
    """Turn the inputs for state tensors into initialisers that lie in the bundle's files below `root`.

    `state` has the name of the state tensor per input, `entries` the manifest's entries and their parts by name. Those
    in `changing` stay inputs too, so that a caller may give other values: returns the names of these, by state tensor.
    """
    graph = model.graph
    remaining_inputs: dict[str, str] = {}
    headers: dict[str, dict[str, tuple[int, int]]] = {}
    taken = {value.name for value in [*graph.inputs, *graph.outputs] if value.name not in state}
    values = [value for value in graph.inputs if value.name in state]
    for value in values:
        graph.inputs.remove(value)
        if not value.uses():
            continue
        name = state[str(value.name)]
        entry = entries[name]
        value.name = new = name if name not in taken else f"state.{name}"
        if entry.file not in headers:
            headers[entry.file] = tensor_ranges(root.joinpath(*entry.file.split("/")))
        value.const_value = _placed(value, entry, headers[entry.file][entry.key], root)
        graph.initializers[new] = value
        if name in changing:
            graph.inputs.append(value)
            remaining_inputs[name] = new
    return remaining_inputs


def _placed(value: ir.Value, entry: StateTensor | StoredPart, where: tuple[int, int], root: Path) -> Any:
    assert value.shape is not None
    assert value.dtype is not None
    shape = [int(size) for size in value.shape]  # type: ignore[arg-type]
    if 0 in shape:
        return ir.tensor(np.zeros(shape, value.dtype.numpy()), name=value.name)
    # A complex element is two numbers in the model.
    width = value.dtype.itemsize * (2 if entry.dtype.startswith("complex") else 1)
    nbytes = math.prod(shape) * value.dtype.itemsize
    begin, name = where[0] + entry.offset * int(width), str(value.name)
    shape = ir.Shape(list(value.shape))
    return ir.ExternalTensor(entry.file, begin, int(nbytes), value.dtype, shape=shape, name=name, base_dir=root)


_STEP = re.compile(r"\[(?:'([^']*)'|\"([^\"]*)\"|(-?\w+))\]")


def names_of(program: Program, updates: Iterable[str], checks: int) -> tuple[list[str], list[str]]:
    """Return names of a model's inputs that are no state, and of its outputs; none stands twice.

    Inputs and results have the names of their paths, `batch['ids'][0]` as `batch.ids.0`, or of the state that a result
    replaces. Then come the values after the call of inputs and state tensors in `updates`, and whether checks hold.
    """
    inputs = _unique(_dotted(spec.path) for spec in program.inputs if not isinstance(spec, StateInput))
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
    further = (*(f"{_dotted(name)}.after" for name in updates), *(f"check.{index}" for index in range(checks)))
    return inputs, _unique((*short, *further), inputs)


def finish(
    model: ir.Model,
    inputs: Sequence[str],
    outputs: Sequence[str],
    *,
    reserved: Collection[str],
    state: Mapping[str, str],
) -> None:
    """Name inputs and outputs, keep other values from having such names, and reduce metadata to provenance.

    `inputs` are those that are no state; `state` has those of state tensors, which keep their names; `reserved` too.
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
