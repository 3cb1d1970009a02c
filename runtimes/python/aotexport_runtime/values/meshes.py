"""Distributed tensors (`DTensor`) as data: the local tensor, and its placements in a mesh of processes.

A bundle holds them on meshes of one process; the reader's process must have joined `torch.distributed`. `from_local`,
`to_local` and `redistribute` of a model run by torch's public API here as well, so that values and gradients are
eager's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from aotexport_runtime.errors import NotSupported

if TYPE_CHECKING:
    import torch

DTENSOR = "torch.distributed.tensor:DTensor"


def flatten(tensor: Any) -> tuple[dict[str, torch.Tensor], Any]:
    """Return the inner tensors of a distributed one (see `inner`), and its mesh and placements as data.

    Raises:
        NotSupported: its mesh has several processes, or bundles lack the kind of its placements.
    """
    mesh = tensor.device_mesh
    if mesh.size() != 1:
        shape = list(mesh.mesh.shape)
        raise NotSupported(f"it is distributed on a mesh of {shape}; a bundle holds what is on meshes of one process")
    names = mesh.mesh_dim_names
    context = {
        "device_type": mesh.device_type,
        "mesh": list(mesh.mesh.shape),
        "names": None if names is None else list(names),
        "placements": described(tensor.placements),
    }
    return inner(tensor), context


def inner(tensor: Any) -> dict[str, torch.Tensor]:
    """Return the local tensor of a distributed one, not copied, by its name in bundles."""
    import torch

    with torch.no_grad():
        return {"local": tensor.to_local()}


def described(placements: Sequence[Any]) -> list[str]:
    """Return placements as data: `"replicate"`, `"shard:0"`, `"partial:sum"`.

    Raises:
        NotSupported: bundles lack the kind of one.
    """
    return [_described(placement) for placement in placements]


def _described(placement: Any) -> str:
    from torch.distributed.tensor import Partial, Replicate, Shard

    if type(placement) is Shard:
        return f"shard:{placement.dim}"
    if type(placement) is Replicate:
        return "replicate"
    if type(placement) is Partial:
        return f"partial:{placement.reduce_op}"
    raise NotSupported(f"it is placed as {placement}; a bundle holds what is sharded, replicated or partial")


def place(tensor: Any) -> Any:
    """Return the mesh and placements of a distributed tensor, as `unflatten` takes them."""
    return tensor.device_mesh, tensor.placements


def check_even(path: str, tensors: Mapping[str, Any], error: RuntimeError) -> None:
    """Explain an error of a layer, if its tensors are in parts of different sizes.

    Args:
        path: of the layer.
        tensors: its tensors, by name.
        error: what torch raised.

    Raises:
        NotSupported: they are.
    """
    for name, tensor in tensors.items():
        for index, placement in enumerate(getattr(tensor, "placements", ())):
            axis, count = getattr(placement, "dim", None), tensor.device_mesh.size(index)
            if axis is not None and tensor.shape[axis] % count:
                size = tensor.shape[axis]
                raise NotSupported(
                    f"`{path}.{name}` {list(tensor.shape)} is in parts over {count} processes along axis {axis}, and "
                    f"{count} does not divide {size}: torch takes all parts for equal. Take a number of processes that "
                    f"divides {size}"
                ) from error


def join_alone() -> None:
    """Let a process that is in no group form one of its own, for tools that run bundles."""
    import torch.distributed as dist

    if not dist.is_initialized():
        store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage] (documented, and not in `__all__`)
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)


def live(context: Any) -> Any:
    """Return the mesh and placements of a context.

    Raises:
        NotSupported: this process has not joined `torch.distributed`, or the mesh has several processes.
    """
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh

    shape, names, device_type = context["mesh"], context["names"], context["device_type"]
    placed = placements(context["placements"])
    if not dist.is_initialized():
        raise NotSupported(
            "the bundle holds distributed tensors, and this process has not joined `torch.distributed`. Call "
            "`torch.distributed.init_process_group` first"
        )
    ranks = torch.tensor([dist.get_rank()]).reshape(shape)
    try:
        return DeviceMesh(device_type, ranks, mesh_dim_names=None if names is None else tuple(names)), placed
    except (RuntimeError, TypeError, ValueError, AssertionError) as error:
        raise NotSupported(f"the mesh of a distributed tensor cannot be made here: {error}") from None


def placements(data: Sequence[str]) -> list[Any]:
    """Return the placements that `described` encoded as `data`."""
    from torch.distributed.tensor import Partial, Replicate, Shard

    make: dict[str, Callable[[str], Any]] = {
        "shard": lambda dim: Shard(int(dim)),
        "replicate": lambda _: Replicate(),
        "partial": Partial,
    }
    return [make[kind](detail) for kind, _, detail in (one.partition(":") for one in data)]


def unflatten(
    tensors: dict[str, torch.Tensor],
    place: Any,
    shape: torch.Size,
    stride: tuple[int, ...],
    grad_placements: Sequence[str] | None = None,
) -> torch.Tensor:
    """Return the distributed tensor of a local one; its gradient has the placements `grad_placements`."""
    from torch.distributed.tensor import DTensor

    mesh, placed = place
    # Torch 2.11 lacks the option.
    grad: dict[str, Any] = {} if grad_placements is None else {"grad_placements": placements(grad_placements)}
    return DTensor.from_local(tensors["local"], mesh, placed, run_check=False, shape=shape, stride=stride, **grad)


def to_local(tensor: Any, grad_placements: Sequence[str] | None) -> torch.Tensor:
    """Return the local tensor of a distributed one; its gradient has the placements `grad_placements`."""
    return tensor.to_local(grad_placements=None if grad_placements is None else placements(grad_placements))


def redistribute(
    tensor: Any,
    target: Sequence[str],
    forward_dtype: torch.dtype | None,
    backward_dtype: torch.dtype | None,
) -> torch.Tensor:
    """Return a distributed tensor in the placements `target`, on its mesh."""
    dtypes = {"forward_dtype": forward_dtype, "backward_dtype": backward_dtype}
    set_dtypes = {name: dtype for name, dtype in dtypes.items() if dtype is not None}
    return tensor.redistribute(placements=placements(target), **set_dtypes)
