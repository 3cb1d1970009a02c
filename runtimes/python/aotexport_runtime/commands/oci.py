"""A bundle as an OCI image layout, a directory that tools for registries of containers copy. No torch.

Source: OCI image specification 1.1, `image-layout.md`; ModelPack (CNCF) 0.0.7, `spec.md` and `config.md`.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta, Struct

from aotexport_runtime.bundle.check import faults_of
from aotexport_runtime.bundle.directory import MANIFEST_NAME
from aotexport_runtime.bundle.read import Bundle, open_bundle, read_manifest
from aotexport_runtime.bundle.signature import SIGNATURE_NAME
from aotexport_runtime.bundle.staging import link, staged
from aotexport_runtime.errors import BundleInvalid
from aotexport_runtime.schema.limits import Limits
from aotexport_runtime.schema.manifest import FileEntry

_MODEL = "application/vnd.cncf.model"
_IMAGE = "application/vnd.oci.image"
_FILE, _TAG = "org.cncf.model.filepath", "org.opencontainers.image.ref.name"


class _Described(Struct):
    digest: Annotated[str, Meta(pattern="^sha256:[0-9a-f]{64}$")]
    annotations: dict[str, str] = {}

    def place(self, layout: Path) -> Path:
        return layout / "blobs" / self.digest.replace(":", "/")


class _Index(Struct):
    manifests: list[_Described]


class _Image(Struct):
    layers: list[_Described]


Record = TypeVar("Record", _Index, _Image)


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
        image["annotations"] = {_TAG: tag}
        index = {"schemaVersion": 2, "mediaType": f"{_IMAGE}.index.v1+json", "manifests": [image]}
        (stage / "index.json").write_bytes(_json(index))
        (stage / "oci-layout").write_bytes(_json({"imageLayoutVersion": "1.0.0"}))
    return image["digest"]


def read_layout(layout: Path, output: Path, *, tag: str, force: bool, limits: Limits) -> Path:
    """Write the bundle of an image layout to a directory, in one step, checked as by `check`; return the directory.

    Args:
        layout: directory of the layout; the files that the bundle's manifest lists are taken, no others.
        output: directory to write.
        tag: name of the image.
        force: replace a bundle at `output`.
        limits: the most that the bundle may ask for.

    Raises:
        BundleInvalid: the layout has no such image, or no bundle, or a broken one.
        OutputExists: something is at `output`, or nothing can be made there.
        NotWritten: the file system refuses.
    """
    images = _decoded(layout / "index.json", _Index, limits).manifests
    image = next((each for each in images if each.annotations.get(_TAG) == tag), None)
    if image is None:
        raise BundleInvalid(f"`{layout}` has no image `{tag[:100]}`", check="bundle-missing/manifest")
    layers = {each.annotations.get(_FILE, ""): each for each in _decoded(image.place(layout), _Image, limits).layers}
    with staged(output, force=force) as stage:
        if MANIFEST_NAME not in layers:
            raise BundleInvalid(f"`{layout}` has no `{MANIFEST_NAME}`", check="bundle-missing/manifest")
        manifest = read_manifest(_bytes(layers[MANIFEST_NAME].place(layout), limits), limits)
        for name in (MANIFEST_NAME, SIGNATURE_NAME, *(entry.path for entry in manifest.files)):
            if name in layers and (place := layers[name].place(layout)).is_file():
                stage.joinpath(name).parent.mkdir(parents=True, exist_ok=True)
                link(place.resolve(), stage / name)
        for fault in faults_of(stage, limits=limits):
            raise fault
    return output.absolute()


def _decoded(file: Path, kind: type[Record], limits: Limits) -> Record:
    try:
        return msgspec.json.decode(_bytes(file, limits), type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise BundleInvalid(f"`{file}` is of no image layout: {error}", check="bundle-missing/manifest") from None


def _bytes(file: Path, limits: Limits) -> bytes:
    """Return a file of JSON, which is no larger than a bundle's may be."""
    try:
        with file.open("rb") as stream:
            data = stream.read(limits.json_nbytes + 1)
    except OSError as error:
        raise BundleInvalid(f"`{file}`: {error.strerror}", check="bundle-missing/manifest") from None
    if len(data) > limits.json_nbytes:
        raise BundleInvalid(f"`{file}` is larger than {limits.json_nbytes} bytes", check="bundle-missing/manifest")
    return data


def _layer(bundle: Bundle, entry: FileEntry, blobs: Path) -> dict[str, Any]:
    place = blobs / entry.sha256
    if not place.exists():
        link(bundle.file(entry.path), place)
    kind = "weight" if entry.path.endswith(".safetensors") else "doc" if entry.path.endswith(".md") else "weight.config"
    described = {"mediaType": f"{_MODEL}.{kind}.v1.raw", "digest": f"sha256:{entry.sha256}", "size": entry.nbytes}
    return _with_path(described, entry.path)


def _with_path(described: Mapping[str, Any], path: str) -> dict[str, Any]:
    # By the second name tools that know no models write the file.
    return {**described, "annotations": {_FILE: path, "org.opencontainers.image.title": path}}


def _blob(data: bytes, media_type: str, blobs: Path) -> dict[str, Any]:
    digest = hashlib.sha256(data).hexdigest()
    (blobs / digest).write_bytes(data)
    return {"mediaType": media_type, "digest": f"sha256:{digest}", "size": len(data)}


def _json(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()
