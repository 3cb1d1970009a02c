"""The kernels that programs launch, and which compiled code of them runs on a device. Data only, no torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable

from aotexport_runtime.allowed.operators import KERNEL
from aotexport_runtime.bundle.packs import TARGET
from aotexport_runtime.bundle.read import Bundle
from aotexport_runtime.schema.targets import Kernel, KernelBinary, KernelCandidate

CompiledCandidate = tuple[KernelCandidate, KernelBinary]
"""A candidate of a kernel, and its code for one architecture."""

PTX = "ptx"
_ARCHITECTURE_SPECIFIC = 9
"""From this major version on, code is compiled with features of one architecture alone."""


def architectures_for(available: Collection[str], capability: tuple[int, int]) -> list[str]:
    """Return which of the available kinds of code run on a device, best first.

    Machine code (`sm_80`) runs on devices of the same major and of an equal or higher minor version; text (`ptx`) is
    compiled by the driver of newer devices. `capability`: major and minor version of the device.
    """
    major, minor = capability
    minors = [minor, *(range(minor - 1, -1, -1) if major < _ARCHITECTURE_SPECIFIC else ())]
    names = [f"sm_{major}{each}" for each in minors]
    return [name for name in (*names, *((PTX,) if major >= 8 else ())) if name in available]


def choose(
    kernels: Iterable[Kernel], available: Collection[str], capability: tuple[int, int], shared_limit: int
) -> tuple[str, dict[str, list[CompiledCandidate]]] | None:
    """Return the best kind of code that every kernel has, with the candidates of each; None: there is none.

    For `capability` see `architectures_for`; `shared_limit` is the most shared memory per block, in bytes.
    """
    kernels = list(kernels)
    for architecture in architectures_for(available, capability):
        chosen = {
            kernel.name: [
                (candidate, binary)
                for candidate in kernel.candidates
                for binary in candidate.binaries
                if binary.architecture == architecture and binary.shared_nbytes <= shared_limit
            ]
            for kernel in kernels
        }
        if all(chosen.values()):
            return architecture, chosen
    return None


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
