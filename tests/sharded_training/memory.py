"""Memory of weights, gradients and optimizer state of one rank.

Run as `python -m tests.sharded_training.memory DIRECTORY RANK WORLD_SIZE` once per rank: prints the bytes that the rank
holds after a step under `DistributedDataParallel`, and with parameters in parts.
"""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import aotexport_runtime
from tests.sharded_training.models import batch
from tests.sharded_training.ranks import adamw, sharded


def held_nbytes(module: nn.Module, rank: int) -> int:
    """Train a step; return the bytes of weights, gradients and optimizer state that this rank then holds."""
    optimizer = adamw(module)
    module(batch(rank, 0)).backward()
    optimizer.step()

    def tensors() -> Iterator[torch.Tensor]:
        for parameter in module.parameters():
            yield from (parameter, parameter.grad)
            yield from (value for value in optimizer.state[parameter].values() if value.dim())

    local = [value.to_local() if isinstance(value, DTensor) else value for value in tensors()]
    return sum({part.untyped_storage().data_ptr(): part.untyped_storage().nbytes() for part in local}.values())


def main(path: Path, rank: int, ranks: int) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{path.parent / 'store'}", rank=rank, world_size=ranks)
    print(held_nbytes(DistributedDataParallel(aotexport_runtime.load(path).train()), rank))
    print(held_nbytes(sharded(aotexport_runtime.load(path).train(), "blocks"), rank))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]).absolute(), int(sys.argv[2]), int(sys.argv[3]))
