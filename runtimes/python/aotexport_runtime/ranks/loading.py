"""What ranks take: the same bundle, or all get the same error; and each its part of a batch."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist

from aotexport_runtime.errors import AotExportError, ArgumentInvalid, NotSupported
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


def part(rows: torch.Tensor, *, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """Return the rows that this rank takes of a batch of all ranks: as many as any other, in order of the ranks.

    The mean over ranks of the means over their rows is then the mean over the batch.

    Args:
        rows: the batch, the same on every rank; its first axis is parted.
        group: the ranks; None: all of the job, or this process where no group was made.

    Returns:
        A view of `rows`.

    Raises:
        ArgumentInvalid: the number of rows is no multiple of the number of ranks; on every rank.
    """
    if not dist.is_initialized():
        return rows
    count = dist.get_world_size(group)
    if len(rows) % count:
        fewer = len(rows) // count * count
        raise ArgumentInvalid(
            f"`rows`: {count} ranks do not divide {len(rows)} rows, and a mean over ranks would not be the mean over "
            f"rows. Take {fewer} or {fewer + count} rows, or another number of ranks"
        )
    return rows.chunk(count)[dist.get_rank(group)]
