"""The kernels that a bundle's programs launch. No torch."""

from __future__ import annotations

from collections import Counter

from aotexport_runtime.bundle.packs import TARGET
from aotexport_runtime.bundle.read import Bundle
from aotexport_runtime.schema.kernels import Kernel
from aotexport_runtime.validate.lowered import KERNEL


def launches_of(bundle: Bundle, program: str) -> dict[str, Counter[str]]:
    """Return how often the `forward` and the `backward` of a program launch each kernel."""
    names = ["forward"] if bundle.lowered(TARGET, program).backward is None else ["forward", "backward"]
    graphs = {part: bundle.lowered_graph(TARGET, program, backward=part == "backward") for part in names}
    return {
        part: Counter(node.op.removeprefix(KERNEL) for node in graph.nodes if node.op.startswith(KERNEL))
        for part, graph in graphs.items()
    }


def kernels_of(bundle: Bundle, program: str) -> list[Kernel]:
    """Return the kernels that the lowered form of a program launches."""
    used = set[str]().union(*launches_of(bundle, program).values())
    return [kernel for kernel in bundle.kernels(TARGET).kernels if kernel.name in used]
