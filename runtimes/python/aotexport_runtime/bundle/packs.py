"""The compiled code of a bundle's kernels: packs that are compressed by zlib. No torch."""

from __future__ import annotations

import hashlib
import zlib

from aotexport_runtime.bundle.read import Bundle
from aotexport_runtime.errors import BundleInvalid, Place
from aotexport_runtime.schema.targets import KernelBinary

TARGET = "cuda"
KERNELS = Place(f"targets/{TARGET}/kernels/kernels.json")


def unpacked(bundle: Bundle, architecture: str) -> bytes:
    """Return the compiled code of all kernels for one architecture; a damaged pack is refused (`BundleInvalid`)."""
    pack = next(pack for pack in bundle.kernels(TARGET).packs if pack.architecture == architecture)
    path = f"targets/{TARGET}/kernels/{pack.file}"
    decompressor = zlib.decompressobj()
    try:
        data = decompressor.decompress(bundle.bytes_of(path), pack.nbytes + 1)
    except zlib.error as error:
        message = f"not compressed by zlib: {error}"
        raise BundleInvalid(message, where=path, check="kernel-malformed/pack-zlib") from None
    if len(data) != pack.nbytes or not decompressor.eof:
        message = f"it does not hold the {pack.nbytes} bytes that the kernels' record says"
        raise BundleInvalid(message, where=path, check="kernel-malformed/pack-size")
    return data


def code_of(binary: KernelBinary, pack: bytes, where: Place = KERNELS) -> bytes:
    """Return the code of a kernel in the pack of its architecture; another digest is refused (`BundleInvalid`)."""
    code = pack[binary.offset : binary.offset + binary.nbytes]
    if hashlib.sha256(code).hexdigest() != binary.sha256:
        raise where.invalid("the SHA-256 of a kernel's code differs from its record's", "kernel-malformed/code-digest")
    return code
