"""The kernels that a bundle's programs launch, and their compiled code. No torch."""

from __future__ import annotations

import hashlib
import zlib
from collections import Counter

from aotexport_runtime.bundle.read import Bundle
from aotexport_runtime.errors import BundleInvalid
from aotexport_runtime.schema.kernels import Kernel, KernelBinary
from aotexport_runtime.validate.lowered import KERNEL

TARGET = "cuda"


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


def unpacked(bundle: Bundle, architecture: str) -> bytes:
    """Return the compiled code of all kernels for one architecture.

    Raises:
        BundleInvalid: the pack is damaged, or of another size.
    """
    pack = next(pack for pack in bundle.kernels(TARGET).packs if pack.architecture == architecture)
    path = f"targets/{TARGET}/kernels/{pack.file}"
    decompressor = zlib.decompressobj()
    try:
        data = decompressor.decompress(bundle.bytes_of(path), pack.nbytes + 1)
    except zlib.error as error:
        raise BundleInvalid(f"not compressed by zlib: {error}", where=path, code="kernel-malformed") from None
    if len(data) != pack.nbytes or not decompressor.eof:
        raise BundleInvalid(
            f"it does not hold the {pack.nbytes} bytes that the kernels' record says",
            where=path,
            code="kernel-malformed",
        )
    return data


def code_of(binary: KernelBinary, pack: bytes) -> bytes:
    """Return the code of a kernel, its digest compared.

    Raises:
        BundleInvalid: the digest differs.
    """
    code = pack[binary.offset : binary.offset + binary.nbytes]
    if hashlib.sha256(code).hexdigest() != binary.sha256:
        raise BundleInvalid(
            "the SHA-256 of a kernel's code differs from its record's",
            where=binary.architecture,
            code="kernel-malformed",
        )
    return code
