"""Distributed tensors (`DTensor`) as data: the local tensor, and its placements in a mesh of processes.

Bundles hold them on meshes of one process. `from_local`, `to_local` and `redistribute` run by torch's public API.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from aotexport_runtime.errors import NotSupported, NotWritten, attempt

if TYPE_CHECKING:
    import torch


def flatten(tensor: Any) -> tuple[dict[str, torch.Tensor], Any]:
    """Return the local tensor of a distributed one, not copied, by its name in bundles; its mesh and placements."""
    import torch

    with torch.no_grad():
        return {"local": tensor.to_local()}, (tensor.device_mesh, tensor.placements)


def data(context: Any) -> dict[str, Any]:
    """Return mesh and placements as data; what bundles lack is refused (`NotSupported`)."""
    mesh, placed = context
    if mesh.size() != 1:
        shape = list(mesh.mesh.shape)
        raise NotSupported(f"it is distributed on a mesh of {shape}; a bundle holds what is on meshes of one process")
    names = mesh.mesh_dim_names
    return {
        "device_type": mesh.device_type,
        "mesh": list(mesh.mesh.shape),
        "names": None if names is None else list(names),
        "placements": described(placed),
    }


def described(placements: Sequence[Any]) -> list[str]:
    """Return placements as data, `"replicate"`, `"shard:0"`, `"partial:sum"`; others are refused (`NotSupported`)."""
    from torch.distributed.tensor import Partial, Replicate, Shard

    found: list[str] = []
    for placement in placements:
        if type(placement) not in (Shard, Replicate, Partial):
            raise NotSupported(f"it is placed as {placement}; a bundle holds what is sharded, replicated or partial")
        of = f":{placement.dim}" if type(placement) is Shard else ""
        of = f":{placement.reduce_op}" if type(placement) is Partial else of
        found.append(f"{type(placement).__name__.lower()}{of}")
    return found


def live(context: Any) -> Any:
    """Return the mesh and placements of data; refused (`NotSupported`) outside of `torch.distributed`."""
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
    context: Any,
    shape: torch.Size,
    stride: tuple[int, ...],
    grad_placements: Sequence[str] | None = None,
) -> torch.Tensor:
    """Return the distributed tensor of a local one; its gradient has the placements `grad_placements`."""
    from torch.distributed.tensor import DTensor

    mesh, placed = context
    # Torch 2.11 lacks the option.
    grad: dict[str, Any] = {} if grad_placements is None else {"grad_placements": placements(grad_placements)}
    return DTensor.from_local(tensors["local"], mesh, placed, run_check=False, shape=shape, stride=stride, **grad)


def to_local(tensor: Any, grad_placements: Sequence[str] | None) -> torch.Tensor:
    """Return the local tensor of a distributed one; its gradient has the placements `grad_placements`."""
    return tensor.to_local(grad_placements=None if grad_placements is None else placements(grad_placements))


def redistribute(
    tensor: Any, target: Sequence[str], forward_dtype: torch.dtype | None, backward_dtype: torch.dtype | None
) -> torch.Tensor:
    """Return a distributed tensor in the placements `target`, on its mesh."""
    dtypes = {"forward_dtype": forward_dtype, "backward_dtype": backward_dtype}
    set_dtypes = {name: dtype for name, dtype in dtypes.items() if dtype is not None}
    return tensor.redistribute(placements=placements(target), **set_dtypes)


def join_alone() -> None:
    """Let a process that is in no group form one of its own, for tools that run bundles."""
    import torch.distributed as dist

    if not dist.is_initialized():
        store = dist.HashStore()
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)


def check_even(path: str, tensors: Mapping[str, Any], error: RuntimeError) -> None:
    """Explain an error of the layer at `path`, if its tensors are in parts of different sizes (`NotSupported`)."""
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


def is_distributed(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is a `DTensor`, of which this rank may hold a part."""
    return hasattr(tensor, "full_tensor")


class Gathering:
    """The tensors of a module that are still to be gathered; every rank gathers all of them."""

    def __init__(self, tensors: Iterable[torch.Tensor], *, in_parts: bool) -> None:
        """Plan to gather tensors in this order; `in_parts`: those that are distributed, which programs read whole."""
        self.in_parts = in_parts
        self._left: deque[Any] = deque(t for t in tensors if in_parts and is_distributed(t))

    def whole(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor whole; every rank asks for those in parts in the same order, each once."""
        if not self._left or self._left[0] is not tensor:
            return tensor
        return self._left.popleft().full_tensor()

    def written_by_first_rank(self, write: Callable[[], None]) -> None:
        """Run `write` on rank 0 alone, which may ask for whole tensors; return on all ranks, or raise its error.

        Where no tensor is in parts, each process runs it.
        """
        if not self.in_parts:
            write()
            return
        import torch.distributed as dist

        # The other ranks wait, and raise it too.
        failed = attempt(write) if dist.get_rank() == 0 else None
        while self._left:
            self._left.popleft().full_tensor()
        told: list[Any] = [None if failed is None else (str(failed), getattr(failed, "errno", None))]
        dist.broadcast_object_list(told, src=0)
        if failed is not None:
            raise failed
        if told[0] is not None:
            text, number = told[0]
            message = f"rank 0 could not write: {text}"
            raise NotSupported(message) if number is None else NotWritten(message, number)
