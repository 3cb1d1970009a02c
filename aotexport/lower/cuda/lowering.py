"""A functional graph to forward and backward graphs of operator calls and kernel launches."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from aotexport.capture.trace.fake_kernels import FAKE_KERNELS
from aotexport.errors import AttemptFailed
from aotexport.lower.cuda.retarget import CannotLower, retarget
from aotexport.lower.cuda.sources import KernelSource, kernel_source
from aotexport.lower.cuda.wrapper import capturing, launch
from aotexport.model.refusals import attempt
from aotexport.process.blocks import quiet
from aotexport.torch_internals.calls import FakeTensorMode
from aotexport.torch_internals.inductor import (
    compile_for_gpu,
    joint_passes,
    offline_gpu,
    partitioned,
    rounding_as_eager,
)
from aotexport.torch_internals.patches import fake_kernels


@dataclass(frozen=True)
class LoweredGraph:
    """A lowered forward or backward graph.

    Attributes:
        module: operator calls and launches; placeholders of sizes beside `inputs` are the program's symbols.
        inputs: names of its placeholders that the caller fills, in order.
        outputs: per output, its name before it was lowered; None: it is no value.
    """

    module: torch.fx.GraphModule
    inputs: list[str]
    outputs: list[str | None]


@dataclass
class LoweredGraphs:
    """A program's lowered graphs, with every kernel of both.

    The forward takes the program's inputs, and returns the results of the functional graph's forward, then saved
    values. The backward takes saved values by name and tangents, and returns a gradient per input; inference has none.
    """

    forward: LoweredGraph
    backward: LoweredGraph | None
    kernels: list[KernelSource]


def lower(module: torch.fx.GraphModule, mode: FakeTensorMode, *, returned: int, tangents: int | None) -> LoweredGraphs:
    """Return the lowered graphs of a functional graph, which is left as it is.

    The shape environment of `mode` may gain guards. The forward returns the first `returned` outputs; of `tangents`, an
    inference graph has None.

    Raises:
        CannotLower: says why.
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
                return LoweredGraphs(forward, backward, list(_kernels(modules)))
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
    if _calls(module):
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
    """Yield the dtypes of a graph's tensors."""
    for node in module.graph.nodes:
        value = node.meta.get("val")
        for each in value if isinstance(value, tuple | list) else (value,):
            if isinstance(each, torch.Tensor):
                yield each.dtype


def _outputs(module: torch.fx.GraphModule) -> list[Any]:
    values: Any = module.graph.output_node().args[0]
    return list(values) if isinstance(values, tuple | list) else [values]


def _calls(module: torch.fx.GraphModule) -> bool:
    return any(node.op == "call_function" for node in module.graph.nodes)


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
