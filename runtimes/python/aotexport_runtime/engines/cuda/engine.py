"""The engine `cuda`: programs lowered to precompiled kernels."""

from __future__ import annotations

import hashlib
import logging
import zlib

import torch

from aotexport_runtime.bundle import Bundle
from aotexport_runtime.engines.codegen import Environment
from aotexport_runtime.engines.cuda.choice import choose
from aotexport_runtime.engines.cuda.driver import Driver
from aotexport_runtime.engines.cuda.launch import Launcher
from aotexport_runtime.engines.lowered import Lowered, lowered_graphs
from aotexport_runtime.errors import BundleInvalid, NotSupported
from aotexport_runtime.schema.kernels import Kernel, KernelBinary
from aotexport_runtime.schema.program import Program
from aotexport_runtime.validate.lowered import KERNEL

log = logging.getLogger("aotexport_runtime")

TARGET = "cuda"


class CudaEngine:
    """Gives lowered programs for CUDA devices; one per loaded bundle."""

    def __init__(self) -> None:
        self._packs: dict[str, bytes] = {}

    def __call__(self, bundle: Bundle, program: Program, environment: Environment) -> Lowered | None:
        """Return `program` on its kernels, or None, with the reason in the log, where they do not run."""
        device = environment.device
        if device is None or device.type != "cuda" or not bundle.has_target(TARGET, program.name):
            return None
        try:
            return self._lowered(bundle, program, environment, device)
        except NotSupported as error:
            log.info("program %s runs without its kernels: %s", program.name, error)
            return None

    def _lowered(self, bundle: Bundle, program: Program, environment: Environment, device: torch.device) -> Lowered:
        library = bundle.kernels(TARGET)
        used = _used(bundle, program)
        properties = torch.cuda.get_device_properties(device)
        available = [pack.architecture for pack in library.packs]
        limit = getattr(properties, "shared_memory_per_block_optin", 48 << 10)
        kernels = [kernel for kernel in library.kernels if kernel.name in used]
        chosen = choose(kernels, available, (properties.major, properties.minor), limit)
        if chosen is None:
            raise NotSupported(
                f"it has code for {', '.join(available)}, and none of that runs on {properties.name} "
                f"(sm_{properties.major}{properties.minor})"
            )
        architecture, candidates = chosen
        driver = Driver.load()
        pack = self._pack(bundle, architecture)
        launchers = {
            kernel.name: Launcher(
                kernel,
                *candidates[kernel.name],
                lambda binary: code_of(binary, pack),
                driver,
                device,
                lambda: torch.cuda.current_stream(device).cuda_stream,
            )
            for kernel in kernels
        }
        log.info("program %s runs on %d kernels for %s", program.name, len(kernels), architecture)
        return lowered_graphs(bundle, TARGET, program, environment, launchers)

    def _pack(self, bundle: Bundle, architecture: str) -> bytes:
        if architecture not in self._packs:
            self._packs[architecture] = unpacked(bundle, architecture)
        return self._packs[architecture]


def _used(bundle: Bundle, program: Program) -> set[str]:
    names: set[str] = set()
    for backward in (False, True) if bundle.lowered(TARGET, program.name).backward is not None else (False,):
        graph = bundle.lowered_graph(TARGET, program.name, backward=backward)
        names |= {node.op.removeprefix(KERNEL) for node in graph.nodes if node.op.startswith(KERNEL)}
    return names


def unpacked(bundle: Bundle, architecture: str) -> bytes:
    """Return the compiled code of all kernels for one architecture.

    Raises:
        BundleInvalid: the pack is damaged, or of another size.
    """
    pack = next(pack for pack in bundle.kernels(TARGET).packs if pack.architecture == architecture)
    path = f"targets/{TARGET}/kernels/{pack.file}"
    decompressor = zlib.decompressobj()
    try:
        data = decompressor.decompress(bundle.file(path).read_bytes(), pack.nbytes + 1)
    except zlib.error as error:
        raise BundleInvalid(f"not compressed by zlib: {error}", where=path) from None
    if len(data) != pack.nbytes or not decompressor.eof:
        raise BundleInvalid(f"it does not hold the {pack.nbytes} bytes that the kernels' record says", where=path)
    return data


def code_of(binary: KernelBinary, pack: bytes) -> bytes:
    """Return the code of a kernel, its digest compared.

    Raises:
        BundleInvalid: the digest differs.
    """
    code = pack[binary.offset : binary.offset + binary.nbytes]
    if hashlib.sha256(code).hexdigest() != binary.sha256:
        raise BundleInvalid("the SHA-256 of a kernel's code differs from its record's", where=binary.architecture)
    return code


def kernels_of(bundle: Bundle, program: Program) -> list[Kernel]:
    """Return the kernels that the lowered form of `program` launches."""
    used = _used(bundle, program)
    return [kernel for kernel in bundle.kernels(TARGET).kernels if kernel.name in used]
