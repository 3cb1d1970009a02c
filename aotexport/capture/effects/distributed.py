"""Distributed tensors in the model's code: conversions from and to local tensors and to other placements, as nodes.

A node calls torch's public method again, so that autograd sees the same as in eager execution.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch

from aotexport.errors import ExportFailed
from aotexport.model.source_lines import user_line
from aotexport.process.patches import Patch
from aotexport.torch_internals.subclasses import within_subclass
from aotexport.torch_internals.tracing import record_call, traces_above_autograd, tracing_paused
from aotexport_runtime.errors import NotSupported
from aotexport_runtime.values import meshes


class FromLocal:
    """Make a distributed tensor like one of the trace: the target of its nodes."""

    __name__ = "from_local"

    def __init__(self, template: Any) -> None:
        """Take the tensor of the trace."""
        self._place = template.device_mesh, template.placements
        self._shape, self._stride = template.size(), template.stride()

    def __call__(self, local: torch.Tensor, grad_placements: Sequence[str] | None) -> torch.Tensor:
        """Return the distributed tensor of `local`; see `meshes.unflatten`."""
        return meshes.unflatten({"local": local}, self._place, self._shape, self._stride, grad_placements)


def patches() -> list[Patch]:
    """Return patches of methods of distributed tensors; none where no code uses such tensors."""
    if "torch.distributed.tensor" not in sys.modules:
        return []
    from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

    from_local_for_real, to_local_for_real = DTensor.from_local, DTensor.to_local
    redistribute_for_real = DTensor.redistribute

    @functools.wraps(from_local_for_real)
    def from_local(local_tensor: Any, *args: Any, grad_placements: Any = None, **kwargs: Any) -> Any:
        placements = {} if grad_placements is None else {"grad_placements": grad_placements}

        def call() -> torch.Tensor:
            return from_local_for_real(local_tensor, *args, **kwargs, **placements)

        return _recorded(call, lambda made: (FromLocal(made), (local_tensor, _described(grad_placements))))

    @functools.wraps(to_local_for_real)
    def to_local(self: Any, *, grad_placements: Any = None) -> Any:
        call = functools.partial(to_local_for_real, self, grad_placements=grad_placements)
        if not torch.is_grad_enabled():
            # Torch returns the inner tensor itself, which the trace knows.
            return call()
        return _recorded(call, lambda _: (meshes.to_local, (self, _described(grad_placements))))

    @functools.wraps(redistribute_for_real)
    def redistribute(self: Any, device_mesh: Any = None, placements: Any = None, **options: Any) -> Any:
        if device_mesh is not None and device_mesh != self.device_mesh:
            raise ExportFailed(
                f"{user_line()}the model moves a distributed tensor to another mesh, which a bundle cannot"
            )
        call = functools.partial(redistribute_for_real, self, device_mesh, placements, **options)
        dtypes = (options.get("forward_dtype"), options.get("backward_dtype"))
        return _recorded(call, lambda made: (meshes.redistribute, (self, _described(made.placements), *dtypes)))

    def full_tensor(self: Any, *, grad_placements: Any = None) -> Any:
        whole = redistribute(self, placements=[Replicate()] * self.device_mesh.ndim)
        return to_local(whole, grad_placements=grad_placements)

    reason = "Record conversions of distributed tensors"
    refusal = "Refuse to distribute a tensor; the code, as models import the function by name"
    return [
        Patch(DTensor, "from_local", staticmethod(from_local), reason),
        Patch(DTensor, "to_local", to_local, reason),
        Patch(DTensor, "redistribute", redistribute, reason),
        Patch(DTensor, "full_tensor", full_tensor, reason),
        Patch(distribute_tensor, "__code__", _distribute_tensor.__code__, refusal),
    ]


def _distribute_tensor(tensor: Any, device_mesh: Any, placements: Any, *, src_data_rank: Any) -> Any:
    """Replace the code of torch's function of this signature, which keeps its defaults and globals."""
    from aotexport.capture.effects.distributed import refuse_distribution  # pyrefly: ignore

    refuse_distribution()


def refuse_distribution() -> NoReturn:
    """Refuse a model that distributes a tensor in its call: that sends values from one process to the others."""
    raise ExportFailed(
        f"{user_line()}the model calls `distribute_tensor`, which sends values between processes, and which a bundle "
        "cannot hold. Distribute the tensor before the export, or make it of its local part (`DTensor.from_local`)"
    )


def _recorded(call: Callable[[], Any], described: Callable[[Any], tuple[Any, tuple[Any, ...]]]) -> Any:
    """Return the result of `call`; record the node whose target and arguments `described` gives for it."""
    if within_subclass() or not traces_above_autograd():
        return call()
    with tracing_paused() as tracer:
        made = call()
        target, args = described(made)
        record_call(tracer, target, args, made)
    return made


def _described(placements: Any) -> list[str] | None:
    try:
        return None if placements is None else meshes.described(placements)
    except NotSupported as error:
        raise ExportFailed(f"{user_line()}a distributed tensor cannot be held in a bundle: {error}") from error
