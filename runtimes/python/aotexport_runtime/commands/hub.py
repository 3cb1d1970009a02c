"""`push` and `pull`: bundles in repositories of the Hugging Face Hub, `hf://OWNER/NAME[@REVISION]`. No torch."""

from __future__ import annotations

import glob
import importlib
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Any, TypeVar

from aotexport_runtime.bundle.check import faults_of
from aotexport_runtime.bundle.directory import MANIFEST_NAME
from aotexport_runtime.bundle.read import Bundle, open_bundle, read_manifest
from aotexport_runtime.bundle.signature import MOST_NBYTES, SIGNATURE_NAME
from aotexport_runtime.bundle.staging import link, staged
from aotexport_runtime.commands.oci import read_layout
from aotexport_runtime.errors import (
    ArgumentInvalid,
    BundleInvalid,
    HubFailed,
    NotSupported,
    attempt,
    first_line,
    printable,
)
from aotexport_runtime.module.describe import describe_overview, describe_program, sections
from aotexport_runtime.schema.limits import DEFAULT, Limits
from aotexport_runtime.values.arguments import path_of

Result = TypeVar("Result")
_ADDRESS = re.compile(r"hf://([^/@\s]+/[^/@\s]+)(?:@(\S+))?")
_CARD, _FOLDER = "README.md", "bundle/"
_BEGIN, _END = "<!-- aotexport: begin -->", "<!-- aotexport: end -->"


def push(path: str | os.PathLike[str], address: str, *, licence: str | None = None, private: bool = False) -> str:
    """Write a bundle to the folder `bundle` of a repository, in one commit, with a model card; return the commit's URL.

    The repository is made if there is none. Files beside the folder stay. Of a card that is there the part between our
    marks is written anew, or added; the rest stays, metadata too.

    Args:
        path: directory of the bundle; every file is compared with its digest first.
        address: `hf://OWNER/NAME`, or `hf://OWNER/NAME@BRANCH`.
        licence: identifier for the card, as the Hub knows it: `apache-2.0`.
        private: make a private repository, if there is none.

    Raises:
        ArgumentInvalid: `address` is none.
        BundleInvalid: there is no bundle, or it is broken.
        HubFailed: the Hub refuses, or cannot be reached.
        NotSupported: `huggingface_hub` is not installed.
    """
    repository, revision = _parts(address)
    hub, bundle = _library(), open_bundle(path)
    api = hub.HfApi(library_name="aotexport")

    def commit() -> str:
        api.create_repo(repository, private=private, exist_ok=True)
        if revision is not None:
            api.create_branch(repository, branch=revision, exist_ok=True)
        there = api.list_repo_files(repository, revision=revision)
        before = hub.hf_hub_download(repository, _CARD, revision=revision) if _CARD in there else None
        files: dict[str, str | bytes] = {_FOLDER + name: str(bundle.directory.files / name) for name in _names(bundle)}
        files[_CARD] = _card(hub, bundle, address, before and Path(before).read_text("utf-8"), licence).encode()
        operations = [
            *(hub.CommitOperationAdd(name, file) for name, file in files.items()),
            *(hub.CommitOperationDelete(name) for name in there if name.startswith(_FOLDER) and name not in files),
        ]
        message = f"Add the bundle {bundle.manifest.name}"
        return api.create_commit(repository, operations, commit_message=message, revision=revision).commit_url

    return _asked(address, commit)


def pull(address: str, output: str | os.PathLike[str], *, force: bool = False, limits: Limits = DEFAULT) -> Path:
    """Write the bundle of a repository to a directory, in one step; return the directory.

    The files that its manifest lists are taken, no others, and all is checked, as by `check`, before it takes its
    place. They stay in the library's cache too: without network (`HF_HUB_OFFLINE=1`) what is there is taken.

    Args:
        address: `hf://OWNER/NAME`, or `hf://OWNER/NAME@REVISION`: a branch, a tag or a commit. Or
            `oci:DIRECTORY[:TAG]`, an image layout, as `push` writes it, and `skopeo copy` brings it from a registry.
        output: directory to write.
        force: replace a bundle at `output`.
        limits: the most that the bundle may ask for.

    Raises:
        ArgumentInvalid: `address` is none.
        BundleInvalid: the repository has no bundle, or a broken one.
        HubFailed: the Hub refuses, or cannot be reached.
        NotSupported: `huggingface_hub` is not installed.
        OutputExists: something is at `output`, or nothing can be made there.
        NotWritten: the file system refuses.
    """
    place = path_of("output", output)
    if address.startswith("oci:"):
        layout, _, tag = address.removeprefix("oci:").partition(":")
        return read_layout(Path(layout), place, tag=tag or "latest", force=force, limits=limits)
    repository, revision = _parts(address)
    hub = _library()
    with staged(place, force=force) as stage:
        first = {MANIFEST_NAME: limits.json_nbytes, SIGNATURE_NAME: MOST_NBYTES}
        folder, commit = _fetched(hub, address, repository, revision, first)
        if not (folder / MANIFEST_NAME).is_file():
            message = f"`{address}` has no file `{_FOLDER}{MANIFEST_NAME}`: it holds no bundle"
            raise BundleInvalid(message, check="bundle-missing/manifest")
        manifest = read_manifest((folder / MANIFEST_NAME).read_bytes(), limits)
        sizes = first | {entry.path: entry.nbytes for entry in manifest.files}
        folder, _ = _fetched(hub, address, repository, commit, sizes)
        for name in sizes:
            if (folder / name).is_file():
                stage.joinpath(name).parent.mkdir(parents=True, exist_ok=True)
                link((folder / name).resolve(), stage / name)
        for fault in faults_of(stage, limits=limits):
            raise fault
    return place.absolute()


def _parts(address: str) -> tuple[str, str | None]:
    """Return repository and revision of an address."""
    found = _ADDRESS.fullmatch(address)
    if found is None:
        raise ArgumentInvalid(
            f"`{address}` is no address of a repository; write `hf://OWNER/NAME` or `hf://OWNER/NAME@REVISION`"
        )
    return found[1], found[2]


def _library() -> Any:
    try:
        return importlib.import_module("huggingface_hub")
    except ImportError as error:
        needed = f"repositories of the Hub need the package huggingface_hub ({error})"
        raise NotSupported(f"{needed}: pip install 'aotexport-runtime[hub]'") from None


def _asked(address: str, run: Callable[[], Result]) -> Result:
    """Return what a function that asks the Hub returns; what it raises is one error of ours."""
    found = attempt(run)
    if isinstance(found, Exception):
        told = getattr(found, "server_message", None) or first_line(found) or type(found).__name__
        if getattr(getattr(found, "response", None), "status_code", 0) in (401, 403):
            told = f"{told.rstrip('.')}. Log in by `hf auth login`, as one who may"
        raise HubFailed(f"`{address}`: {told}") from found
    return found


def _fetched(
    hub: Any, address: str, repository: str, revision: str | None, sizes: Mapping[str, int]
) -> tuple[Path, str]:
    """Fetch those files of the bundle that are there, of at most these sizes in bytes.

    Return the bundle's folder in the cache of the library, and the commit that it is of.
    """
    sizes = {_FOLDER + name: nbytes for name, nbytes in sizes.items()}
    found = attempt(lambda: hub.HfApi().get_paths_info(repository, [*sizes], revision=revision))
    # Where the Hub is not reached nothing is fetched.
    for each in [] if isinstance(found, Exception) else found:
        if getattr(each, "size", 0) > sizes[each.path]:
            message = f"`{address}` has {each.size:,} bytes of it, and at most {sizes[each.path]:,} are expected"
            raise BundleInvalid(message, where=each.path.removeprefix(_FOLDER), check="file-differs/size")
    patterns = [glob.escape(name) for name in sizes]
    snapshot = Path(
        _asked(address, lambda: hub.snapshot_download(repository, revision=revision, allow_patterns=patterns))
    )
    return snapshot / _FOLDER, snapshot.name


def _names(bundle: Bundle) -> Iterator[str]:
    yield from (MANIFEST_NAME, *(entry.path for entry in bundle.manifest.files))
    if (bundle.directory.files / SIGNATURE_NAME).is_file():
        yield SIGNATURE_NAME


def _card(hub: Any, bundle: Bundle, address: str, before: str | None, licence: str | None) -> str:
    """Return the model card: of one that is there, with our part written anew."""
    told = f"{_BEGIN}\n\n{_facts(bundle, address)}\n{_END}"
    text = before or f"# {printable(bundle.manifest.name)}\n"
    if _BEGIN in text and _END in text:
        text = text.partition(_BEGIN)[0] + told + text.partition(_END)[2]
    else:
        text = f"{text.rstrip()}\n\n{told}\n"
    card = hub.ModelCard(text if text.startswith("---") else f"---\nlibrary_name: aotexport\n---\n{text}")
    card.data.library_name = "aotexport"
    card.data.tags = sorted({*(card.data.tags or ()), "aotexport", "pytorch"})
    card.data.license = licence or card.data.license
    return str(card)


def _facts(bundle: Bundle, address: str) -> str:
    elements = Counter[str]()
    for entry in bundle.manifest.state:
        elements[entry.dtype] += prod(entry.shape)
    lines = describe_overview(bundle)
    lines.append(
        "  dtypes: " + (", ".join(f"{name} ({count:,} elements)" for name, count in elements.items()) or "none")
    )
    for program in map(bundle.program, bundle.program_names):
        found = sections(bundle, program)
        lines += ["", describe_program(bundle, program)]
        for title in ("inputs", "outputs"):
            lines += [f"  {title}:", *(f"    {line}" for line in found[title])]
    # An indented block has no end that a name in the bundle could write.
    shown = "\n".join(f"    {printable(line)}".replace("\n", "\\n").rstrip() for line in lines)
    return _TEXT.format(address=address, shown=shown)


_TEXT = """\
A PyTorch model as a bundle of `aotexport`: graphs in JSON and weights in safetensors, without code and pickles. It is
called, trained and saved by the package `aotexport-runtime`.

```sh
pip install 'aotexport-runtime[hub,torch]'
python -m aotexport_runtime pull {address} -o bundle
```

```python
import aotexport_runtime

module = aotexport_runtime.load("bundle").eval()
```

## What it holds

{shown}
"""
