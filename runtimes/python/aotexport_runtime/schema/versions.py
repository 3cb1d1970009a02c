"""Versions of the format, the JSON, and of the calling convention: how graphs, saved tensors, epilogues are invoked."""

from __future__ import annotations

import msgspec

from aotexport_runtime.errors import BundleInvalid, BundleTooNew
from aotexport_runtime.schema.bounded import VersionText, bounds_of

Version = tuple[int, int]

FORMAT_VERSION: Version = (1, 1)
"""Format that this version of the schema writes, and the newest that it reads."""

OLDEST_FORMAT: Version = (1, 0)
"""Oldest format that this version of the schema reads; its documents decode as they are."""

CALLING_CONVENTION = 1
"""Calling convention that the exporter writes, and the newest that the runtime runs."""

OLDEST_CALLING_CONVENTION = 1
"""Oldest calling convention that the runtime runs."""

FEATURES: dict[str, Version] = {
    "Manifest.operator_set": (1, 1),
    "Manifest.extensions": (1, 1),
    "Manifest.must_understand": (1, 1),
    "Graph.metas": (1, 1),
    "Graph.operators": (1, 1),
    "Program.questions": (1, 1),
    "VectorInput.quantiles": (1, 1),
    "CompiledHalf.written": (1, 1),
}
"""Fields newer than 1.0, with the format version that brought them; writers compute `min_reader` from it."""


class Envelope(msgspec.Struct, frozen=True):
    """The two fields that every version of the manifest has; all others are ignored."""

    format: str
    min_reader: str


def parse_version(text: str) -> Version:
    """Return `(major, minor)` of `"1.0"`; refuse what is not of that form (`BundleInvalid`)."""
    if not bounds_of(VersionText).takes(text):
        message = f"expected a version `MAJOR.MINOR`, got {text[:20]!r}"
        raise BundleInvalid(message, where="bundle.json", check="version-malformed/version")
    major, minor = text.split(".")
    return int(major), int(minor)


def format_version(version: Version) -> str:
    """Return `"1.0"` of `(1, 0)`."""
    return f"{version[0]}.{version[1]}"


def check_readable(envelope: Envelope, *, oldest: Version = OLDEST_FORMAT, supported: Version = FORMAT_VERSION) -> None:
    """Refuse a bundle that a reader of the formats `oldest` to `supported` cannot read.

    Raises:
        BundleTooNew: its major version or its oldest permitted reader is newer.
        BundleInvalid: its format is older, its two versions contradict each other, or one is no version at all.
    """
    written, needed = parse_version(envelope.format), parse_version(envelope.min_reader)
    needed = max(needed, (written[0], 0))
    if needed > supported:
        raise BundleTooNew(
            f"this bundle has format {envelope.format} and needs a reader of format {format_version(needed)} or newer; "
            f"this runtime reads up to {format_version(supported)}. Install a newer aotexport-runtime, or export the "
            f"model again with an aotexport that writes format {format_version(supported)}",
            needed=needed,
            supported=supported,
        )
    if not (written[0], 0) <= parse_version(envelope.min_reader) <= written:
        raise BundleInvalid(
            f"`min_reader` is {envelope.min_reader}; expected {written[0]}.0 to {envelope.format}, the bundle's format",
            where="bundle.json",
            check="version-contradicts/min-reader",
        )
    if written < oldest:
        raise BundleInvalid(
            f"this bundle has format {envelope.format}; this runtime reads {format_version(oldest)} to "
            f"{format_version(supported)}. Load it with an older aotexport-runtime, or export the model again",
            where="bundle.json",
            check="version-older/format",
        )
