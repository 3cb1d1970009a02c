"""A captured program to its lowered record, graphs and kernels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from aotexport.capture.functional.mutating_operators import call_subgraph
from aotexport.capture.trace.forward_capture import ForwardCapture
from aotexport.capture.trace.shapes import guards
from aotexport.lower.cuda.encode import encode_lowered, tensors_among
from aotexport.lower.cuda.lowering import LoweredGraphs, lower
from aotexport.lower.cuda.recapture import captured_for_gpu
from aotexport.lower.cuda.retarget import CannotLower
from aotexport.lower.cuda.sources import KernelSource, joined
from aotexport.torch_internals.functional import FunctionalCapture, tangent_descriptor
from aotexport.torch_internals.names import OpOverload, has_sizes_of_data
from aotexport_runtime.schema.graph import Graph
from aotexport_runtime.schema.program import Program
from aotexport_runtime.schema.targets import LoweredProgram
from aotexport_runtime.validate.trees import taken_apart

FORWARD_FILE, BACKWARD_FILE = "forward.json", "backward.json"

UNROLLED_FACTOR, UNROLLED_NODES = 10, 500
"""Least factor of the forward graph's nodes, and least nodes, of a functional graph that unrolls operators."""


@dataclass(frozen=True)
class CudaProgram:
    """A program lowered for CUDA devices: its record, its graphs by file name, and the kernels that they launch."""

    record: LoweredProgram
    graphs: dict[str, Graph]
    kernels: tuple[KernelSource, ...]


def lower_program(program: Program, forward: ForwardCapture, functional: FunctionalCapture) -> CudaProgram:
    """Lower a captured program with a functional graph, which is left as it is.

    Raises:
        CannotLower: says why.
    """
    convention = program.functional
    assert convention is not None
    program = taken_apart(program)
    _check(program, forward, functional)
    mode = forward.fakes.mode
    tangents = _tangents(functional)
    returned = len(convention.mutations) + len(convention.outputs) + convention.intermediate_bases
    joint = convention.gradients is not None
    known = {*program.guards, *convention.guards}
    captured = captured_for_gpu(forward, functional, grad=joint)
    lowered = lower(captured.module, mode, returned=returned, tangents=tangents if joint else None)
    extra = tuple(guard for guard in guards(forward, program.dimensions) if guard not in known)
    return _encoded(program, lowered, returned, extra, _namespaces(functional))


def _namespaces(functional: FunctionalCapture) -> frozenset[str]:
    """Return the namespaces of the custom operators that a functional graph calls."""
    graphs = [module.graph for module in functional.module.modules() if isinstance(module, torch.fx.GraphModule)]
    targets = [node.target for graph in graphs for node in graph.nodes]
    called = {target.namespace for target in targets if isinstance(target, OpOverload)}
    return frozenset(called - {"aten"})


def _tangents(functional: FunctionalCapture) -> int:
    return sum(tangent_descriptor(node) is not None for node in functional.module.graph.find_nodes(op="placeholder"))


def _check(program: Program, forward: ForwardCapture, functional: FunctionalCapture) -> None:
    devices = {value.device.type for value in forward.inputs if isinstance(value, torch.Tensor)}
    if not devices <= {"cpu"}:
        raise CannotLower(f"it was captured on {', '.join(sorted(devices))}, and is lowered from programs on cpu only")
    whole, apart = len(forward.graph.graph.nodes), len(functional.module.graph.nodes)
    if apart > UNROLLED_NODES and apart > UNROLLED_FACTOR * whole:
        raise CannotLower(f"its functional graph takes {whole} operators apart to {apart}, step by step")
    if any(map(has_sizes_of_data, functional.module.graph.nodes)):
        raise CannotLower("it has sizes that only the data of a call know")
    if functional.module.graph.find_nodes(op="call_function", target=torch.ops.aten._assert_scalar.default):
        raise CannotLower("it checks values of tensors, on which the path through the code depends")
    for node in functional.module.graph.find_nodes(op="get_attr"):
        if isinstance(getattr(functional.module, node.target), torch.fx.GraphModule):
            names = {str(user.target) for user in node.users if user.target is not call_subgraph}
            if not names:
                continue
            raise CannotLower(f"it calls graphs of their own, by {', '.join(f'`{name}`' for name in sorted(names))}")
    gradients = program.functional.gradients if program.functional else None
    computed = {node.name for node in functional.module.graph.nodes if node.op == "call_function"}
    # Kernels check the versions of all saved tensors, also of inputs that a checkpointed part reads.
    if gradients is not None and any(computed.intersection(partition.unchecked) for partition in gradients.partitions):
        raise CannotLower(
            "a custom autograd function or a checkpointed part keeps tensors whose versions nobody checks"
        )


def _encoded(
    program: Program, lowered: LoweredGraphs, returned: int, guards: tuple[Any, ...], namespaces: frozenset[str]
) -> CudaProgram:
    convention = program.functional
    assert convention is not None
    names = [spec_name(index) for index in range(len(program.inputs))]
    inputs = dict(zip(lowered.forward.inputs, names, strict=True))
    kernels = joined(lowered.kernels)
    if lowered.backward is None:
        graph = encode_lowered(lowered.forward, inputs, list(range(returned)), namespaces)
        record = LoweredProgram(forward=FORWARD_FILE, guards=guards)
        return CudaProgram(record, {FORWARD_FILE: graph}, tuple(kernels.values()))
    taken = list(tensors_among(lowered.backward))
    tangents = [name for name in taken if name.startswith("tangents_")]
    saved = [name for name in taken if not name.startswith("tangents_")]
    positions = {name: index for index, name in enumerate(lowered.forward.outputs) if index >= returned}
    forward_graph = encode_lowered(
        lowered.forward, inputs, [*range(returned), *(positions[name] for name in saved)], namespaces
    )
    backward_inputs = {name: f"saved:{index}" for index, name in enumerate(saved)}
    backward_inputs |= {name: f"tangent:{index}" for index, name in enumerate(tangents)}
    assert convention.gradients is not None
    gradients = [None if index is None else index - returned for index in convention.gradients.of_inputs]
    backward_graph = encode_lowered(lowered.backward, backward_inputs, gradients, namespaces)
    record = LoweredProgram(forward=FORWARD_FILE, backward=BACKWARD_FILE, saved=len(saved), guards=guards)
    return CudaProgram(record, {FORWARD_FILE: forward_graph, BACKWARD_FILE: backward_graph}, tuple(kernels.values()))


def spec_name(index: int) -> str:
    """Return the name of a program's input in lowered graphs."""
    return f"input:{index}"
