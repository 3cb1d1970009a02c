"""A program with its graph in plain tensors, as ONNX has; state of a subclass is `<name>.<attribute>`."""

from __future__ import annotations

import msgspec
import torch

from aotexport.errors import ExportFailed
from aotexport.values.subclasses import part_names
from aotexport_runtime.bundle.read import Bundle
from aotexport_runtime.bundle.weights import load_parts, parts_of
from aotexport_runtime.schema.graph import Graph
from aotexport_runtime.schema.manifest import StateTensor, StoredPart
from aotexport_runtime.schema.program import ArgumentInput, FreshOutput, InputSpec, Program, SizeInput, StateInput

Plain = tuple[Program, Graph, dict[str, torch.Tensor]]
"""A program in plain tensors, its graph, of which indices of inputs are, and its state by name, mapped from files."""


def plain(bundle: Bundle, program: Program) -> Plain:
    """Return `program` in plain tensors.

    `ExportFailed`: arguments or results are tensor subclasses, or it changes state of one or a container of the caller.
    """
    if program.container_changes:
        raise ExportFailed(
            f"program `{program.name}` changes `{program.container_changes[0].path}` of its caller, and ONNX models "
            "change nothing. Return the new value instead"
        )
    names = {spec.name for spec in program.inputs if isinstance(spec, StateInput)}
    state = {
        name: part
        for entry in bundle.manifest.state
        if entry.name in names
        for name, part in stored_parts(entry).items()
    }
    tensors = dict(zip(state, load_parts(bundle, state.values()), strict=True))
    forward = bundle.graph(program.name, program.forward.file)
    wraps = any(not isinstance(spec, SizeInput) and spec.subclass is not None for spec in program.inputs)
    if not wraps and not any(node.op.startswith(("subclass::", "distributed::")) for node in forward.nodes):
        return program, forward, tensors
    functional = program.functional
    reason = _why_not(program)
    if functional is None or reason:
        raise ExportFailed(
            f"program `{program.name}` has no ONNX form: {reason}, and ONNX has plain tensors only. Give the model "
            "plain tensors, and make those of the subclass inside of it, or let it change and return none"
        )
    return _taken_apart(program), bundle.graph(program.name, functional.file), tensors


def stored_parts(entry: StateTensor) -> dict[str, StateTensor | StoredPart]:
    """Return the plain tensors of an entry of the manifest by name: the entry, or the parts of a tensor subclass."""
    return dict(zip(part_names(entry.name, entry.subclass), parts_of(entry), strict=True))


def _why_not(program: Program) -> str:
    """Return why a program whose inputs have tensor subclasses has no inference graph for ONNX; empty: it has one."""
    for spec in program.inputs:
        if isinstance(spec, ArgumentInput) and spec.subclass is not None:
            return f"`{spec.path}` is a `{spec.subclass.type}`"
    functional = program.functional
    if functional is None:
        return "; ".join(refusal.reason for refusal in program.refusals) or "it has tensors of a subclass"
    if functional.gradients is not None:
        return "its graph in plain tensors records gradients"
    if functional.mutations or program.rebinds:
        return "it changes state, and has tensors of a subclass"
    if not all(isinstance(output, FreshOutput) for output in functional.outputs) or functional.guards:
        return "it returns views, and has tensors of a subclass"
    return ""


def _taken_apart(program: Program) -> Program:
    inputs: list[InputSpec] = []
    places: list[int] = []
    for spec in program.inputs:
        places.append(len(inputs))
        if not isinstance(spec, StateInput) or spec.subclass is None:
            inputs.append(spec)
            continue
        for name, part in zip(part_names(spec.name, spec.subclass), spec.parts, strict=True):
            inputs.append(msgspec.structs.replace(spec, name=name, meta=part, subclass=None, parts=()))
    dimensions = tuple(
        msgspec.structs.replace(dimension, input_index=places[dimension.input_index])
        for dimension in program.dimensions
    )
    return msgspec.structs.replace(program, inputs=tuple(inputs), dimensions=dimensions)
