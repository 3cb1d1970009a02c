"""Programs that a bundle holds of its model in another floating dtype (`model.to(dtype)`). No torch."""

from __future__ import annotations

import re

import msgspec

from aotexport_runtime.bundle.read import Bundle
from aotexport_runtime.schema.manifest import Manifest, StateTensor, VectorEntry

FLOATS = ("bfloat16", "float16", "float32", "float64")
"""Dtypes that a bundle can be cast from and to."""


class CastPrograms(Bundle):
    """An open bundle in the dtype named `dtype`, of which it holds the programs `own` of the cast model."""

    def __init__(self, bundle: Bundle, dtype: str) -> None:
        """Open what `bundle` holds for a dtype of `FLOATS`; its files are shared."""
        listed = {entry.path for entry in bundle.manifest.files}
        programs = bundle.manifest.programs
        self.dtype = dtype
        self.own = frozenset(each.name for each in programs if f"programs/{each.name}/program.{dtype}.json" in listed)
        manifest = _manifest(bundle.manifest, dtype, self.own)
        super().__init__(bundle.directory, manifest, bundle.limits, bundle.manifest_sha256)

    def record_path(self, program: str) -> str:
        """Return the path of the record of a program."""
        own = f"programs/{program}/program.{self.dtype}.json"
        return own if program in self.own else super().record_path(program)


def cast_dtypes(manifest: Manifest) -> list[str]:
    """Return the dtypes that a bundle holds programs of the cast model for."""
    found = (re.fullmatch(r"programs/[^/]+/program\.(\w+)\.json", entry.path) for entry in manifest.files)
    return sorted({match[1] for match in found if match is not None and match[1] in FLOATS})


def is_cast(entry: StateTensor) -> bool:
    """Return whether `model.to(dtype)` casts a tensor, if it is floating."""
    return entry.role != "constant"


def _manifest(manifest: Manifest, dtype: str, own: frozenset[str]) -> Manifest:
    state = tuple(
        msgspec.structs.replace(entry, dtype=dtype) if is_cast(entry) and entry.dtype in FLOATS else entry
        for entry in manifest.state
    )
    programs = tuple(msgspec.structs.replace(entry, targets=("portable",)) for entry in manifest.programs)
    files = tuple(entry for entry in manifest.files if not entry.path.startswith("targets/"))
    calls = tuple(
        VectorEntry(program=name, name=match[1], record=entry.path, tensors=f"{entry.path[:-5]}.safetensors")
        for name in sorted(own)
        for entry in files
        if (match := re.fullmatch(rf"testvectors/{re.escape(name)}\.([^./]+)\.{dtype}\.json", entry.path))
    )
    return msgspec.structs.replace(manifest, state=state, programs=programs, files=files, testvectors=calls, onnx=())
