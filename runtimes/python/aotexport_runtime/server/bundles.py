"""The bundles below a directory: `<model>/<version>/` or `<model>/`, found anew at each look."""

from __future__ import annotations

import glob
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from aotexport_runtime.errors import ArgumentInvalid

MANIFEST = "bundle.json"
ADAPTERS = ".adapters"
"""What the directory of a bundle's adapters is named after the bundle's own: `1.adapters/NAME/`."""
OPTIONS = ".options.json"
"""What the file with a bundle's own options is named after its directory: `1.options.json`."""
OWN = ("engine", "threads", "priority", "max_batch_size", "pad", "max_latency_ms", "max_waiting", "max_tokens")
"""The options that a bundle may have of its own: see `ServableOptions`."""
WEIGHT = "weight"
LEAST = {WEIGHT: 0, "request_timeout_s": 0.001}
"""Beside them, with the least of each: its share of the requests that name no version, where several are served; and
the longest time of a request, within that of the server."""
_ADAPTER = "adapter_config.json"

Fingerprint = tuple[tuple[str, int, int, int], ...]
"""Path, size, time and inode of every file of a bundle."""


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A bundle that a model could be served from; a model without versions has version `1`.

    `files` tells it, its adapters and options from what was there before; `weight`, `request_timeout_s`: see `LEAST`.
    """

    version: str
    path: Path
    files: Fingerprint
    weight: float = 0
    request_timeout_s: float = math.inf

    @property
    def nbytes(self) -> int:
        """Size of its files in bytes."""
        return sum(size for _, size, _, _ in self.files)


def find_models(root: Path, name: str | None = None) -> dict[str, list[Candidate]]:
    """Return the bundles of each model, the newest version first.

    Args:
        root: a directory of models; or a bundle, which is a model of that name.
        name: of the model, if `root` is that of one: a bundle, or a directory of its versions.
    """
    if name is not None:
        found = _candidates(root)
        return {name: found} if found else {}
    if (root / MANIFEST).is_file():
        return {root.resolve().name: _candidates(root)}
    models = {entry.name: _candidates(Path(entry.path)) for entry in _directories(root)}
    return {name: found for name, found in sorted(models.items()) if found}


def places(root: Path, name: str | None = None) -> str:
    """Return where `find_models` looks for bundles, for people."""
    models = [root] if name is not None else [root, root / "MODEL"]
    return " or ".join(f"`{place / MANIFEST}`" for place in [*models, models[-1] / "VERSION"])


def misplaced(root: Path, found: dict[str, list[Candidate]]) -> list[Path]:
    """Return the bundles up to four levels below `root` that are in no place where `find_models` looks."""
    known = {bundle.path for bundles in found.values() for bundle in bundles}
    # Not by `Path.glob`, which fails where a directory goes meanwhile.
    looks = (glob.iglob("*/" * depth + MANIFEST, root_dir=root) for depth in range(5))
    paths = [(root / path).parent for look in looks for path in look]
    return [path for path in paths if known.isdisjoint([path, *path.parents])]


def _candidates(model: Path) -> list[Candidate]:
    if (model / MANIFEST).is_file():
        return [_candidate("1", model)]
    versions = [entry.name for entry in _directories(model) if _is_version(entry.name)]
    return [_candidate(name, model / name) for name in sorted(versions, key=int, reverse=True)]


def _is_version(name: str) -> bool:
    return name.isascii() and name.isdecimal() and len(name) <= 18 and not name.startswith("0")


def _candidate(version: str, path: Path) -> Candidate:
    beside = path.with_name(path.name + ADAPTERS)
    added = [(f"{ADAPTERS}/{name}", nbytes, when, inode) for name, nbytes, when, inode in _files(beside)]
    try:
        own = options_beside(path)
        told, server = {key: own[key] for key in own if key != WEIGHT}, {key: own[key] for key in LEAST if key in own}
    except ArgumentInvalid as error:  # told when the bundle is tried
        told, server = str(error), {}
    added += [(f"{OPTIONS} {told}", 0, 0, 0)] if told else []  # a weight changes without another load
    return Candidate(version=version, path=path, files=tuple(sorted([*_files(path), *added])), **server)


def adapters_beside(path: Path) -> dict[str, Path]:
    """Return the directories of the adapters of the bundle at `path`, by name: those of `<path>.adapters/`."""
    directories = _directories(path.with_name(path.name + ADAPTERS))
    found = {
        entry.name: Path(entry.path) for entry in directories if os.path.exists(os.path.join(entry.path, _ADAPTER))
    }
    return dict(sorted(found.items()))


def options_beside(path: Path) -> dict[str, Any]:
    """Return the options of the bundle at `path` alone, by name: those of `<path>.options.json`.

    Raises:
        ArgumentInvalid: the file is malformed, or has others than `OWN` and those of `LEAST`.
    """
    file = path.with_name(path.name + OPTIONS)
    if not file.exists():
        return {}
    try:
        found = msgspec.json.decode(file.read_bytes(), type=dict[str, Any])
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ArgumentInvalid(f"`{file.name}` holds no options: {error}") from None
    names = (*OWN, *LEAST)
    if unknown := sorted(found.keys() - set(names)):
        raise ArgumentInvalid(f"`{file.name}`: there is no option `{unknown[0][:100]}`; there are {', '.join(names)}")
    for name, least in LEAST.items():
        value = found.get(name, least)
        if type(value) not in (int, float) or not least <= value < math.inf:
            raise ArgumentInvalid(f"`{file.name}`: `{name}` is a number from {least} on, got {value!r:.100}")
    return found


def _files(root: Path) -> list[tuple[str, int, int, int]]:
    paths = (os.path.join(folder, name) for folder, _, names in os.walk(root) for name in names)
    return [entry for path in paths for entry in _file(path, os.path.relpath(path, root))]


def _file(path: str, shown: str) -> list[tuple[str, int, int, int]]:
    """Return the entry of a file in a fingerprint, if it is there."""
    try:
        status = os.stat(path)
    except OSError:  # it went while we looked
        return []
    return [(shown, status.st_size, status.st_mtime_ns, status.st_ino)]


def _directories(path: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(path) as entries:
            return [entry for entry in entries if not entry.name.startswith(".") and entry.is_dir()]
    except OSError:  # it went while we looked
        return []
