"""Ways to train a model on several ranks, for every system: whole copies, or parts of weights, gradients and state."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from benchmarks.models import call

if TYPE_CHECKING:
    from benchmarks.job import Job

_TIMEOUT = timedelta(minutes=10)


def join(store: str, rank: int, ranks: int) -> None:
    """Join the group of a job; the ranks meet in the file `store`."""
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks, timeout=_TIMEOUT)


class SharedStep:
    """Forward, loss, backward, AdamW on this rank's batch, with what the ranks do together."""

    def __init__(self, job: Job, way: str) -> None:
        """Load the module of a job and give it to `way`."""
        import torch

        self._module = WAYS[way](job.load("train"))
        self._inputs, self._loss = job.model.inputs(), job.model.loss
        self._optimizer = torch.optim.AdamW(self._module.parameters(), lr=1e-5)

    def __call__(self) -> Any:
        """Train a step; return the output."""
        output = call(self._module, self._inputs)
        self._optimizer.zero_grad()
        self._loss(output).backward()
        self._optimizer.step()
        return output

    def held_nbytes(self) -> int:
        """Return the bytes of weights, gradients and optimizer state that this rank holds after a step."""
        tensors = (getattr(tensor, "_local_tensor", tensor) for tensor in self._tensors())
        return sum({each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in tensors}.values())

    def _tensors(self) -> Iterator[Any]:
        for parameter in self._module.parameters():
            yield parameter
            if parameter.grad is not None:
                yield parameter.grad
            yield from (value for value in self._optimizer.state[parameter].values() if value.dim())


def _copies(module: Any) -> Any:
    from torch.nn.parallel import DistributedDataParallel

    return DistributedDataParallel(module)


def _parts(module: Any) -> Any:
    """Give each layer of a list (`h.0`) to `fully_shard`, and the whole."""
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    mesh = dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))
    layers = [layer for path, layer in module.named_modules() if re.fullmatch(r"\D*\.\d+", path)]
    for unit in (*layers, module):
        fully_shard(unit, mesh=mesh)
    return module


WAYS: dict[str, Callable[[Any], Any]] = {"DDP": _copies, "FSDP2": _parts}
"""What the ranks share, by name; each returns what to call."""
