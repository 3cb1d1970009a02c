"""Bundles made hostile: copies of a small valid one, edited, and sealed again so that sizes and digests are right."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from aotexport_runtime import BundleInvalid, Limits, open_bundle
from aotexport_runtime.schema.limits import DEFAULT
from tests.golden.refuse import seal
from tests.reader.bundle import without_tables

FILES = {
    "manifest": "bundle.json",
    "program": "programs/train/program.json",
    "forward": "programs/train/forward.json",
    "joint": "programs/train/joint.json",
    "vector": "testvectors/train.example.json",
    "lowered": "targets/cuda/programs/train/lowered.json",
    "lowered forward": "targets/cuda/programs/train/forward.json",
    "lowered backward": "targets/cuda/programs/train/backward.json",
    "kernels": "targets/cuda/kernels/kernels.json",
}
"""Documents that tests edit, by short name."""

END = "-"
"""As the last step of a path: append to the list."""


def schema_of(op: str) -> str:
    """Return the signature of an operator in the running torch; empty: it has none."""
    namespace, _, name = op.partition("::")
    base, _, overload = name.partition(".")
    packet = getattr(getattr(torch.ops, namespace), base, None) if base.isidentifier() else None
    return str(getattr(getattr(packet, overload or "default", None), "_schema", ""))


class Crafted:
    """A copy of a bundle whose documents can be edited."""

    def __init__(self, source: Path, root: Path) -> None:
        self.root = root
        shutil.copytree(source, root)
        self._documents: dict[str, Any] = {}

    def document(self, name: str) -> Any:
        """Return a document of `FILES`, parsed, a graph without tables; edits to it are written by `seal`."""
        if name not in self._documents:
            document = json.loads((self.root / FILES[name]).read_text())
            self._documents[name] = without_tables(document) if "nodes" in document else document
        return self._documents[name]

    def put(self, name: str, path: str, value: Any) -> None:
        """Set the value at `path`: keys and indices, separated by slashes."""
        *steps, last = path.split("/")
        place = self.document(name)
        for step in steps:
            place = place[int(step)] if isinstance(place, list) else place.setdefault(step, {})
        if last == END:
            place.append(value)
        elif isinstance(place, list):
            place[int(last)] = value
        else:
            place[last] = value

    def node(self, graph: str, **fields: Any) -> None:
        """Append a node to a graph, and the signature of its operator."""
        schema = schema_of(str(fields["op"]))
        if schema:
            self.document(graph).setdefault("schemas", {}).setdefault(str(fields["op"]), schema)
        meta = {"kind": "tensor", "dtype": "float32", "shape": [], "stride": []}
        self.put(graph, "nodes/-", {"name": "crafted", "args": [], "meta": meta, **fields})

    def subgraph(self, graph: str, name: str) -> None:
        """Give a graph a body without inputs, nodes and outputs."""
        self.put(graph, f"subgraphs/{name}", {"inputs": [], "nodes": [], "outputs": []})

    def write(self, path: str, data: bytes) -> None:
        """Replace a file."""
        (self.root / path).write_bytes(data)

    def seal(self) -> Path:
        """Write the edited documents, and sizes and digests to the manifest; return the directory."""
        for name, document in self._documents.items():
            if name != "manifest":
                (self.root / FILES[name]).write_text(json.dumps(document))
        (self.root / FILES["manifest"]).write_text(json.dumps(self.document("manifest")))
        return seal(self.root)

    def read(self, limits: Limits = DEFAULT) -> None:
        """Seal, open the bundle and read every program and graph; nothing of it runs."""
        open_bundle(self.seal(), limits=limits).read_graphs()

    def refusal(self, limits: Limits = DEFAULT) -> str:
        """Return the message by which `read` refuses the bundle."""
        with pytest.raises(BundleInvalid) as caught:
            self.read(limits)
        return str(caught.value)
