"""Distributed tensors (`DTensor`) as data: the local tensor, and where it stands in a mesh of processes.

A bundle holds them on meshes of one process; the reader's process must have joined `torch.distributed`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from aotexport_runtime.errors import BundleInvalid, NotSupported

if TYPE_CHECKING:
    import torch

DTENSOR = "torch.distributed.tensor:DTensor"


def flatten(tensor: Any) -> tuple[dict[str, torch.Tensor], Any]:
    """Return the local tensor of a distributed one, and its mesh and placements as data."""
    import torch

    with torch.no_grad():
        local = tensor.to_local()
    mesh = tensor.device_mesh
    names = mesh.mesh_dim_names
    context = {
        "device_type": mesh.device_type,
        "mesh": list(mesh.mesh.shape),
        "names": None if names is None else list(names),
        "placements": [_described(placement) for placement in tensor.placements],
    }
    return {"local": local}, context


def _described(placement: Any) -> list[Any]:
    if placement.is_shard():
        return ["shard", placement.dim]
    if placement.is_replicate():
        return ["replicate", None]
    return ["partial", placement.reduce_op]


def join_alone() -> None:
    """Let a process that is in no group form one of its own, as tools that run bundles for themselves do."""
    import torch.distributed as dist

    if not dist.is_initialized():
        store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage] (documented, and not in `__all__`)
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)


def live(context: Any) -> Any:
    """Return the mesh and placements of a context.

    Raises:
        NotSupported: this process has not joined `torch.distributed`, or the mesh has several processes.
        BundleInvalid: the context is malformed.
    """
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh

    try:
        shape, names, device_type = context["mesh"], context["names"], context["device_type"]
        placements = [_placement(*described) for described in context["placements"]]
        single = all(size == 1 for size in shape)
    except (KeyError, TypeError, ValueError):
        raise BundleInvalid("the context of a distributed tensor is malformed") from None
    if not single or len(placements) != len(shape):
        raise NotSupported(f"the bundle holds distributed tensors on a mesh of {shape}; meshes of one process are read")
    if not dist.is_initialized():
        raise NotSupported(
            "the bundle holds distributed tensors, and this process has not joined `torch.distributed`. Call "
            "`torch.distributed.init_process_group` first"
        )
    ranks = torch.tensor([dist.get_rank()]).reshape(shape)
    try:
        return DeviceMesh(device_type, ranks, mesh_dim_names=None if names is None else tuple(names)), placements
    except (RuntimeError, TypeError, ValueError, AssertionError) as error:
        raise NotSupported(f"the mesh of a distributed tensor cannot be made here: {error}") from None


def _placement(kind: str, detail: Any) -> Any:
    from torch.distributed.tensor import Partial, Replicate, Shard

    if kind == "shard":
        return Shard(detail)
    if kind == "replicate":
        return Replicate()
    if kind == "partial":
        return Partial(detail)
    raise ValueError(kind)


def unflatten(inner: dict[str, torch.Tensor], place: Any, shape: torch.Size, stride: tuple[int, ...]) -> torch.Tensor:
    """Return the distributed tensor of a local one."""
    from torch.distributed.tensor import DTensor

    mesh, placements = place
    return DTensor.from_local(inner["local"], mesh, placements, run_check=False, shape=shape, stride=stride)
