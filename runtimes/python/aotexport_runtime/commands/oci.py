"""A bundle as an OCI image layout, a directory that tools for registries of containers copy. No torch.

Source: OCI image specification 1.1, `image-layout.md`; ModelPack (CNCF) 0.0.7, `spec.md` and `config.md`.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from aotexport_runtime.bundle.directory import MANIFEST_NAME
from aotexport_runtime.bundle.read import Bundle, open_bundle
from aotexport_runtime.bundle.signature import SIGNATURE_NAME
from aotexport_runtime.bundle.staging import link, staged
from aotexport_runtime.schema.manifest import FileEntry

_MODEL = "application/vnd.cncf.model"
_IMAGE = "application/vnd.oci.image"


def write_layout(
    path: str | os.PathLike[str], output: Path, *, tag: str = "latest", licence: str | None = None, force: bool = False
) -> str:
    """Write a bundle as an image layout, in one step; return the digest of its manifest. A file is a layer.

    The same bundle gives the same bytes. Files are hard links to those of the bundle where the file system allows.

    Args:
        path: directory of the bundle; every file is compared with its digest first.
        output: directory to write.
        tag: name of the one image in the layout.
        licence: SPDX identifier: `Apache-2.0`.
        force: replace a layout at `output`.

    Raises:
        BundleInvalid: there is no bundle, or it is broken.
        OutputExists: something is at `output`, or nothing can be made there.
        NotWritten: the file system refuses.
    """
    bundle = open_bundle(path)
    with staged(output, force=force, marker="oci-layout") as stage:
        blobs = stage / "blobs" / "sha256"
        blobs.mkdir(parents=True)
        layers = [_layer(bundle, entry, blobs) for entry in bundle.manifest.files]
        for name in (MANIFEST_NAME, SIGNATURE_NAME):
            if (bundle.directory.files / name).is_file():
                with bundle.directory.open(name) as stream:
                    data = stream.read()
                layers.append(_with_path(_blob(data, f"{_MODEL}.weight.config.v1.raw", blobs), name))
        known = {"name": bundle.manifest.name} | ({"licenses": [licence]} if licence else {})
        files = {"type": "layers", "diffIds": [layer["digest"] for layer in layers]}
        config = {"descriptor": known, "config": {"format": "aotexport"}, "modelfs": files}
        manifest: dict[str, Any] = {
            "schemaVersion": 2,
            "mediaType": f"{_IMAGE}.manifest.v1+json",
            "artifactType": f"{_MODEL}.manifest.v1+json",
            "config": _blob(_json(config), f"{_MODEL}.config.v1+json", blobs),
            "layers": layers,
        }
        image = _blob(_json(manifest), manifest["mediaType"], blobs)
        image["annotations"] = {"org.opencontainers.image.ref.name": tag}
        index = {"schemaVersion": 2, "mediaType": f"{_IMAGE}.index.v1+json", "manifests": [image]}
        (stage / "index.json").write_bytes(_json(index))
        (stage / "oci-layout").write_bytes(_json({"imageLayoutVersion": "1.0.0"}))
    return image["digest"]


def _layer(bundle: Bundle, entry: FileEntry, blobs: Path) -> dict[str, Any]:
    place = blobs / entry.sha256
    if not place.exists():
        link(bundle.file(entry.path), place)
    kind = "weight" if entry.path.endswith(".safetensors") else "doc" if entry.path.endswith(".md") else "weight.config"
    described = {"mediaType": f"{_MODEL}.{kind}.v1.raw", "digest": f"sha256:{entry.sha256}", "size": entry.nbytes}
    return _with_path(described, entry.path)


def _with_path(described: Mapping[str, Any], path: str) -> dict[str, Any]:
    # By the second name tools that know no models write the file.
    return {**described, "annotations": {"org.cncf.model.filepath": path, "org.opencontainers.image.title": path}}


def _blob(data: bytes, media_type: str, blobs: Path) -> dict[str, Any]:
    digest = hashlib.sha256(data).hexdigest()
    (blobs / digest).write_bytes(data)
    return {"mediaType": media_type, "digest": f"sha256:{digest}", "size": len(data)}


def _json(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()
