"""A captured program to its lowered record, graphs of operator calls and kernel launches, and kernels."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from msgspec.structs import replace

from aotexport.capture.functional.mutating_operators import call_subgraph
from aotexport.capture.trace.fake_kernels import FAKE_KERNELS
from aotexport.capture.trace.forward_capture import ForwardCapture
from aotexport.capture.trace.shapes import guards
from aotexport.errors import AttemptFailed
from aotexport.lower.cuda.encode import LoweredGraph, encode_lowered
from aotexport.lower.cuda.retarget import CannotLower, captured_for_gpu, retarget
from aotexport.lower.cuda.sources import KernelSource, joined, kernel_source
from aotexport.lower.cuda.wrapper import capturing, launch
from aotexport.model.refusals import attempt
from aotexport.process.blocks import quiet
from aotexport.torch_internals.calls import FakeTensorMode
from aotexport.torch_internals.functional import FunctionalCapture, tangent_descriptor
from aotexport.torch_internals.inductor import (
    compile_for_gpu,
    joint_passes,
    offline_gpu,
    partitioned,
    rounding_as_eager,
)
from aotexport.torch_internals.names import OpOverload, has_sizes_of_data
from aotexport.torch_internals.patches import fake_kernels
from aotexport_runtime.schema.graph import Graph
from aotexport_runtime.schema.program import Program
from aotexport_runtime.schema.targets import LoweredProgram
from aotexport_runtime.validate.trees import taken_apart


def _lower(
    module: torch.fx.GraphModule, mode: FakeTensorMode, *, returned: int, tangents: int | None
) -> tuple[LoweredGraph, LoweredGraph | None, list[KernelSource]]:
    """Return the lowered forward and backward of a functional graph, which is left as it is, and the kernels of both.

    The forward takes the program's inputs, and returns the first `returned` outputs, then saved values. The backward
    takes saved values by name and `tangents`, and returns a gradient per input; inference has None of both. The shape
    environment of `mode` may gain guards.
    """
    modules: list[torch.fx.GraphModule] = []
    try:
        with (
            attempt("kernels for GPUs"),
            quiet("torch._inductor", "torch._functorch", "torch._dynamo", "torch.fx"),
            fake_kernels(FAKE_KERNELS),
            rounding_as_eager(_dtypes(module)),
        ):
            graph = retarget(module, tangents or 0, mode)
            with offline_gpu(capturing(modules.append)):
                joint_passes(graph, mode)
                backward = None
                if tangents is None:
                    forward = _lowered(graph, mode, modules, visible=returned, is_inference=True)
                else:
                    first, second = partitioned(graph, returned, mode)
                    forward = _lowered(first, mode, modules, visible=returned)
                    _restride(forward, second, mode)
                    backward = _lowered(second, mode, modules, visible=len(_outputs(second)), is_backward=True)
                return forward, backward, list(_kernels(modules))
    except AttemptFailed as refusal:
        lines = [line.strip() for line in str(refusal.error).splitlines() if line.strip()] or [""]
        said = " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]
        raise CannotLower(f"the compiler fails: {said[:300]}") from refusal.error


def _lowered(
    module: torch.fx.GraphModule,
    mode: FakeTensorMode,
    modules: list[torch.fx.GraphModule],
    *,
    visible: int,
    is_backward: bool = False,
    is_inference: bool = False,
) -> LoweredGraph:
    # Before the compiler's passes rename nodes.
    inputs = [node.name for node in module.graph.find_nodes(op="placeholder")]
    outputs = [value.name if isinstance(value, torch.fx.Node) else None for value in _outputs(module)]
    before = len(modules)
    if any(node.op == "call_function" for node in module.graph.nodes):
        compile_for_gpu(module, mode, visible=visible, is_backward=is_backward, is_inference=is_inference)
        if len(modules) != before + 1:
            raise CannotLower(f"the compiler made {len(modules) - before} graphs of one")
        lowered = modules[-1]
    else:
        lowered = module  # The compiler returns a graph without calls as it is.
    return LoweredGraph(lowered, inputs, outputs)


def _kernels(modules: list[torch.fx.GraphModule]) -> Iterator[KernelSource]:
    """Yield the kernels that lowered graphs launch, and record each in the nodes of its launches."""
    sources: dict[int, KernelSource] = {}
    for module in modules:
        for node in module.graph.find_nodes(op="call_function", target=launch):
            tuner = node.meta["tuner"]
            if id(tuner) not in sources:
                sources[id(tuner)] = kernel_source(tuner, node.meta["origins"])
                yield sources[id(tuner)]
            node.meta["kernel"] = sources[id(tuner)]


def _dtypes(module: torch.fx.GraphModule) -> Iterator[torch.dtype]:
    for node in module.graph.nodes:
        value = node.meta.get("val")
        for each in value if isinstance(value, tuple | list) else (value,):
            if isinstance(each, torch.Tensor):
                yield each.dtype


def _outputs(module: torch.fx.GraphModule) -> list[Any]:
    values: Any = module.graph.output_node().args[0]
    return list(values) if isinstance(values, tuple | list) else [values]


def _restride(forward: LoweredGraph, backward: torch.fx.GraphModule, mode: FakeTensorMode) -> None:
    """Give the inputs of `backward` the layout that the lowered forward saves them in.

    Source: torch 2.13, `_functorch/_aot_autograd/graph_compile.py`, before the backward is compiled.
    """
    placeholders = {node.name: node for node in backward.graph.find_nodes(op="placeholder")}
    for name, value in zip(forward.outputs, _outputs(forward.module), strict=True):
        node = placeholders.get(name or "")
        if node is None or not isinstance(value, torch.fx.Node):
            continue
        saved, traced = value.meta["val"], node.meta["val"]
        if isinstance(saved, torch.Tensor) and [*map(str, saved.stride())] != [*map(str, traced.stride())]:
            with mode:
                node.meta["val"] = torch.empty_strided(
                    traced.shape, saved.stride(), dtype=traced.dtype, device=traced.device
                )


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
    """Lower a captured program with a functional graph, which is left as it is; `CannotLower`: says why."""
    convention = program.functional
    assert convention is not None
    program = taken_apart(program)
    _check(program, forward, functional)
    returned = len(convention.mutations) + len(convention.outputs) + convention.intermediate_bases
    joint = convention.gradients is not None
    captured = captured_for_gpu(forward, functional, grad=joint)
    placeholders = functional.module.graph.find_nodes(op="placeholder")
    count = sum(tangent_descriptor(node) is not None for node in placeholders) if joint else None
    lowered, backward, kernels = _lower(captured.module, forward.fakes.mode, returned=returned, tangents=count)
    known = {*program.guards, *convention.guards}
    record = LoweredProgram(
        forward=FORWARD_FILE, guards=tuple(each for each in guards(forward, program.dimensions) if each not in known)
    )
    names = [f"input:{index}" for index in range(len(program.inputs))]
    inputs, namespaces = dict(zip(lowered.inputs, names, strict=True)), _namespaces(functional)
    saved: list[str] = []
    graphs: dict[str, Graph] = {}
    if backward is not None and convention.gradients is not None:
        placeholders = backward.module.graph.find_nodes(op="placeholder")
        pairs = zip(backward.inputs, placeholders, strict=False)
        taken = [name for name, node in pairs if isinstance(node.meta["val"], torch.Tensor)]
        tangents = [name for name in taken if name.startswith("tangents_")]
        saved = [name for name in taken if not name.startswith("tangents_")]
        read = {name: f"saved:{index}" for index, name in enumerate(saved)}
        read |= {name: f"tangent:{index}" for index, name in enumerate(tangents)}
        gradients = [None if index is None else index - returned for index in convention.gradients.of_inputs]
        graphs[BACKWARD_FILE] = encode_lowered(backward, read, gradients, namespaces)
        record = replace(record, backward=BACKWARD_FILE, saved=len(saved))
    positions = {name: index for index, name in enumerate(lowered.outputs) if index >= returned}
    outputs = [*range(returned), *(positions[name] for name in saved)]
    graphs = {FORWARD_FILE: encode_lowered(lowered, inputs, outputs, namespaces), **graphs}
    return CudaProgram(record, graphs, tuple(joined(kernels).values()))


def _namespaces(functional: FunctionalCapture) -> frozenset[str]:
    graphs = [module.graph for module in functional.module.modules() if isinstance(module, torch.fx.GraphModule)]
    targets = [node.target for graph in graphs for node in graph.nodes]
    called = {target.namespace for target in targets if isinstance(target, OpOverload)}
    return frozenset(called - {"aten"})


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
