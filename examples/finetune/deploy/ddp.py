"""Trains a bundle on several ranks, each with a copy of the weights and a part of every batch.

    torchrun --nproc-per-node 2 examples/finetune/deploy/ddp.py out/reader out/five

Needs aotexport_runtime, torch and scikit-learn; not the network's code.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
import torch.distributed as dist
from plain import digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import aotexport_runtime
from aotexport_runtime import ranks

EPOCHS, BATCH = 4, 64


def fit(network: nn.Module, optimizer: torch.optim.Optimizer, epoch: int) -> float:
    """Train an epoch on the digits 0 to 4, in place; return the mean loss over all ranks."""
    images, labels = digits(below=5)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(epoch))
    total, batches = torch.zeros(()), order[: len(order) // BATCH * BATCH].split(BATCH)
    for batch in batches:
        own = ranks.part(batch)
        loss = nn.functional.cross_entropy(network(images[own]), labels[own])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += loss.detach()
    dist.all_reduce(total)
    return total.item() / len(batches) / dist.get_world_size()


def adamw(network: nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer; every rank draws random numbers of its own from here on."""
    torch.manual_seed(dist.get_rank())
    return torch.optim.AdamW(network.parameters(), lr=3e-3)


def train(network: nn.Module) -> list[float]:
    """Train in place; return the loss of every epoch."""
    parallel, optimizer = DistributedDataParallel(network), adamw(network)
    return [fit(parallel, optimizer, epoch) for epoch in range(EPOCHS)]


def options(description: str | None) -> argparse.Namespace:
    """Return the command line's."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("bundle", help="bundle of the untrained network")
    parser.add_argument("tuned", help="where to save the tuned bundle")
    parser.add_argument("--report", type=Path, help="write the losses as JSON")
    return parser.parse_args()


def main() -> None:
    chosen = options(__doc__)
    dist.init_process_group("gloo")  # On GPUs: "nccl".
    network = ranks.load(chosen.bundle, matmul="torch").train()
    losses = train(network)
    if dist.get_rank() == 0:
        aotexport_runtime.save(network, chosen.tuned, force=True)
        print(f"last loss {losses[-1]:.6f} on {dist.get_world_size()} ranks")
        if chosen.report:
            chosen.report.write_text(json.dumps(losses), encoding="utf-8")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
