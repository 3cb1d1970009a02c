"""Trains a bundle on several ranks, each with a part of weights, gradients, optimizer state and batches.

    torchrun --nproc-per-node 2 examples/finetune/deploy/fsdp.py out/reader out/five

Needs aotexport_runtime, torch and scikit-learn; not the network's code.
"""

from __future__ import annotations

import json

import torch.distributed as dist
from ddp import EPOCHS, adamw, fit, options
from torch import nn
from torch.distributed.fsdp import fully_shard

import aotexport_runtime
from aotexport_runtime import ranks


def parted(network: nn.Module) -> nn.Module:
    """Part the weights over all ranks; those of a block are gathered for the block's part of a call alone."""
    mesh = dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))
    for block in network.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(network, mesh=mesh)


def train(network: nn.Module) -> list[float]:
    """Train in place; return the loss of every epoch."""
    parted(network)
    optimizer = adamw(network)
    return [fit(network, optimizer, epoch) for epoch in range(EPOCHS)]


def main() -> None:
    chosen = options(__doc__)
    dist.init_process_group("gloo")  # On GPUs: "nccl", and a mesh of "cuda".
    network = ranks.load(chosen.bundle, matmul="torch", mapped=True).train()
    losses = train(network)
    aotexport_runtime.save(network, chosen.tuned, force=True)
    if dist.get_rank() == 0:
        print(f"last loss {losses[-1]:.6f} on {dist.get_world_size()} ranks")
        if chosen.report:
            chosen.report.write_text(json.dumps(losses), encoding="utf-8")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
