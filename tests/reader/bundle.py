"""Sections 1 to 4: the files of a bundle and the tensors of its state."""

import hashlib
import json
import re
from pathlib import Path
from typing import Any

import torch

from tests.reader.values import dtype

_STORED = {
    "BOOL": "bool",
    "F16": "float16",
    "BF16": "bfloat16",
    "F32": "float32",
    "F64": "float64",
    "C64": "complex64",
    **{f"U{bits}": f"uint{bits}" for bits in (8, 16, 32, 64)},
    **{f"I{bits}": f"int{bits}" for bits in (8, 16, 32, 64)},
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
}


READS = (1, 1)
"""The format that this reader is written from."""


class Refused(Exception):
    """A bundle that section 3 says not to read, with false outputs or metadata (7.4, 7.31), or indexes to nowhere."""


def without_tables(graph: dict[str, Any]) -> dict[str, Any]:
    """Return a graph, changed, with what its tables and those of its bodies hold in the place of indexes (7.32)."""
    users = {"metas": [*graph["inputs"], *graph["nodes"]], "operators": graph["nodes"]}
    tables = {name: graph.pop(name, []) for name in users}
    for (name, values), field in zip(users.items(), ("meta", "op"), strict=True):
        for value in values:
            if isinstance(value[field], int):
                if not 0 <= value[field] < len(tables[name]):
                    raise Refused("index-range")
                value[field] = tables[name][value[field]]
    for body in graph.get("subgraphs", {}).values():
        without_tables(body)
    return graph


class Bundle:
    """A bundle in a directory; every file is compared with the manifest."""

    def __init__(self, root: Path) -> None:
        """Open the bundle at `root`."""
        self.root = root
        self.manifest = json.loads((root / "bundle.json").read_text(encoding="utf-8"))
        self._gate()
        self._listed = {entry["path"]: entry for entry in self.manifest["files"]}

    def _gate(self) -> None:
        """Refuse what this reader cannot know (section 3, steps 1, 2 and 5)."""
        versions = [self.manifest[field] for field in ("format", "min_reader")]
        if not all(re.fullmatch(r"(0|[1-9][0-9]{0,3})\.(0|[1-9][0-9]{0,3})", each) for each in versions):
            raise Refused("version-malformed")
        written, needed = (tuple(map(int, each.split("."))) for each in versions)
        if written[0] > READS[0] or needed > READS:
            raise Refused("version-newer")
        if written < (1, 0):
            raise Refused("version-older" if written[0] == needed[0] else "version-contradicts")
        if not (written[0], 0) <= needed <= written:
            raise Refused("version-contradicts")
        if self.manifest["calling_convention"] != 1:
            raise Refused("convention-unknown")
        if self.manifest.get("operator_set", "aotexport.aten/1") != "aotexport.aten/1":
            raise Refused("operator-set-unknown")
        extensions = self.manifest.get("extensions", {})
        if not all(re.fullmatch("x-[a-z0-9]+(-[a-z0-9]+)*", name) and len(name) <= 64 for name in extensions):
            raise Refused("name-malformed")
        for name in self.manifest.get("must_understand", []):
            raise Refused("extension-unknown" if name in extensions else "reference-missing")

    def read(self, path: str) -> bytes:
        """Return the bytes of a listed file (section 1)."""
        data = (self.root / path).read_bytes()
        entry = self._listed[path]
        assert (len(data), hashlib.sha256(data).hexdigest()) == (entry["nbytes"], entry["sha256"]), path
        return data

    def json(self, path: str) -> Any:
        """Return a parsed file."""
        return json.loads(self.read(path))

    def graph(self, path: str) -> dict[str, Any]:
        """Return a parsed graph, without its tables."""
        return without_tables(self.json(path))

    def tensors(self, path: str) -> dict[str, torch.Tensor]:
        """Return the tensors of a safetensors file."""
        data = self.read(path)
        length = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + length])
        header.pop("__metadata__", None)
        found: dict[str, torch.Tensor] = {}
        for key, entry in header.items():
            begin, end = entry["data_offsets"]
            part = bytearray(data[8 + length + begin : 8 + length + end])
            type_ = dtype(_STORED[entry["dtype"]])
            flat = torch.frombuffer(part, dtype=type_) if part else torch.empty(0, dtype=type_)
            found[key] = flat.clone().reshape(entry["shape"])
        return found

    def state(self) -> dict[str, torch.Tensor]:
        """Return the state by first names (section 4)."""
        files: dict[str, dict[str, torch.Tensor]] = {}
        found: dict[str, torch.Tensor] = {}
        for entry in self.manifest.get("state", []):
            file = entry["file"]
            if file not in files:
                files[file] = self.tensors(file)
            stored = files[file][entry["key"]]
            found[entry["name"]] = self._tensor(entry, stored).requires_grad_(entry.get("requires_grad", False))
        return found

    def _tensor(self, entry: dict[str, Any], stored: torch.Tensor) -> torch.Tensor:
        type_ = dtype(entry["dtype"])
        if type_.is_complex and not stored.is_complex():
            stored = torch.view_as_complex(stored)
        tensor = torch.empty(0, dtype=stored.dtype)
        if entry.get("whole", True):
            return tensor.set_(stored.untyped_storage(), stored.storage_offset(), stored.shape, stored.stride())
        return tensor.set_(stored.untyped_storage(), entry.get("offset", 0), entry["shape"], entry["stride"])
