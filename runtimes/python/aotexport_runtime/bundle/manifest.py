"""The manifest of a bundle, read in steps: envelope, version gate, strict decode, rules. No torch."""

from __future__ import annotations

import os

import msgspec

from aotexport_runtime import schema
from aotexport_runtime.bundle.directory import MANIFEST_NAME, BundleDirectory, read_most
from aotexport_runtime.errors import BundleInvalid
from aotexport_runtime.schema import versions
from aotexport_runtime.schema.codec import check_size_of, refused
from aotexport_runtime.schema.limits import DEFAULT, Limits
from aotexport_runtime.schema.manifest import Manifest
from aotexport_runtime.validate import check_manifest
from aotexport_runtime.values.arguments import path_of


def read_manifest_bytes(path: str | os.PathLike[str], limits: Limits = DEFAULT) -> tuple[BundleDirectory, bytes]:
    """Return the directory of a bundle, held open, and the bytes of its manifest.

    Raises:
        ArgumentInvalid: `path` is no path.
        BundleInvalid: there is no bundle.
    """
    root = path_of("path", path)
    try:
        # Files are read from this directory, even if its path leads to another one by then.
        directory = BundleDirectory(root)
    except (FileNotFoundError, NotADirectoryError, ValueError):
        reason = f"`{path}` is a file, and a bundle is a directory" if root.is_file() else f"no directory `{path}`"
        raise BundleInvalid(reason, check="bundle-missing/directory") from None
    except OSError as error:
        raise BundleInvalid(f"`{path}` cannot be read: {error.strerror}", check="bundle-missing/directory") from None
    try:
        with directory.open(MANIFEST_NAME) as stream:
            data = read_most(stream, limits.json_nbytes)
    except BundleInvalid as error:
        if isinstance(error.__cause__, PermissionError):
            raise
        raise BundleInvalid(
            f"`{path}` is no bundle: it has no file `{MANIFEST_NAME}`", check="bundle-missing/manifest"
        ) from None
    if len(data) > limits.json_nbytes:
        raise BundleInvalid(
            f"larger than the {limits.json_nbytes} bytes of JSON that are read",
            where=MANIFEST_NAME,
            check="json-limit/bytes",
        )
    return directory, data


def check_envelope(data: bytes, limits: Limits = DEFAULT) -> None:
    """Refuse a manifest that is none, or of a version that this runtime does not read."""
    check_size_of(data, MANIFEST_NAME, limits)
    try:
        envelope = msgspec.json.decode(data, type=versions.Envelope)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise refused(error, MANIFEST_NAME, "not the manifest of a bundle: ") from None
    versions.check_readable(envelope)


def read_manifest(data: bytes, limits: Limits = DEFAULT) -> Manifest:
    """Return the manifest in `data`: envelope, version gate, strict decode, then consistency.

    Raises:
        BundleInvalid: see `open_bundle`.
    """
    check_envelope(data, limits)
    manifest = schema.decode_record(data, Manifest, where=MANIFEST_NAME, limits=limits)
    check_manifest(manifest, limits=limits)
    return manifest
