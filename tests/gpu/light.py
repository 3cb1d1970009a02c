"""Bundles without what their models can make again: small enough to bring to the machine with the GPU."""

import hashlib
import json
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from tests.gpu.models import make

WEIGHTS = "weights/model.safetensors"


def make_light(bundle: Path) -> None:
    """Delete the weights and the recorded calls of a bundle, if it has any; `fill` makes it valid again."""
    if not (bundle / WEIGHTS).exists():
        return
    manifest = _manifest(bundle)
    recorded = {path for vector in manifest.pop("testvectors") for path in (vector["record"], vector["tensors"])}
    manifest["files"] = [file for file in manifest["files"] if file["path"] not in recorded]
    for path in (WEIGHTS, *recorded):
        (bundle / path).unlink()
    _write(bundle, manifest)


def fill(bundle: Path) -> None:
    """Write the weights of the model that the bundle is named after, unless it has weights."""
    path = bundle / WEIGHTS
    if path.exists():
        return
    path.parent.mkdir(exist_ok=True)
    save_file(make(bundle.name)[0].state_dict(), path, {"format": "pt"})
    manifest = _manifest(bundle)
    entry = next(file for file in manifest["files"] if file["path"] == WEIGHTS)
    data = path.read_bytes()
    entry.update(nbytes=len(data), sha256=hashlib.sha256(data).hexdigest())
    _write(bundle, manifest)


def _manifest(bundle: Path) -> dict[str, Any]:
    return json.loads((bundle / "bundle.json").read_bytes())


def _write(bundle: Path, manifest: dict[str, Any]) -> None:
    (bundle / "bundle.json").write_text(json.dumps(manifest))
