"""`load` on every rank of a group: all get the same bundle, or all get the same error."""

from __future__ import annotations

import os
from typing import Any

import torch.distributed as dist

from aotexport_runtime.errors import AotExportError, NotSupported
from aotexport_runtime.module.bundle_module import BundleModule
from aotexport_runtime.module.loading import load as load_alone


def load(
    path: str | os.PathLike[str], *, group: dist.ProcessGroup | None = None, target: str = "auto", **options: Any
) -> BundleModule:
    """Load the bundle at `path` on every rank, and compare what was loaded.

    Args:
        path: directory of the bundle; may differ from rank to rank.
        group: the ranks, all of which call this; None: all of the job. Where no group was made, as in a script that
            runs without `torchrun`, this is `aotexport_runtime.load`.
        target: see `aotexport_runtime.load`; not `onnx`, which does not train.
        options: other options of `aotexport_runtime.load`.

    Returns:
        The module; its bundle has the digest that those of the other ranks have.

    Raises:
        NotSupported: a rank could not load its bundle, or ranks loaded different ones; on every rank, with what each
            found.
        AotExportError: no group was made, and the bundle could not be loaded.
    """
    if not dist.is_initialized():
        return load_alone(path, target=target, **options)
    module: BundleModule | None = None
    try:
        module = load_alone(path, target=target, **options)
        own = (module.bundle.manifest_sha256, "")
    except (AotExportError, OSError) as error:
        own = ("", f"{type(error).__name__}: {error}")
    found: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, own, group)
    if module is None or any(digest != found[0][0] for digest, _ in found):
        listed = "\n".join(
            f"  - rank {rank}: {error or f'bundle {digest[:16]}'}" for rank, (digest, error) in enumerate(found)
        )
        raise NotSupported(
            "ranks train one bundle together, and these loaded different ones (digests of `bundle.json`), or none. "
            f"Give every rank the same bundle:\n{listed}"
        )
    return module
