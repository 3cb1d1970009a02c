"""Bundles trained with state in parts over ranks, beside eager in one process on the joined batch.

Run as `python -m tests.sharded_training.ranks DIRECTORY RANK WORLD_SIZE WAY ...` once per rank: prints what was
compared, or fails.
"""

import os
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import aotexport_runtime
from aotexport_runtime import adapters
from tests.sharded_training.models import UNITS, batch, make

STEPS = 3


def sharded(module: nn.Module, units: str) -> nn.Module:
    """Shard a module in place over all ranks; return it."""
    mesh = dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))
    for unit in UNITS[units](module):
        fully_shard(unit, mesh=mesh)
    return module


def state_of(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return the whole state."""
    state = module.state_dict()
    return {name: value.full_tensor() if isinstance(value, DTensor) else value for name, value in state.items()}


def adamw(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in module.parameters() if p.requires_grad], lr=1e-2)


def train_joined(module: nn.Module, ranks: int, takes: int) -> None:
    """Train one process on what all ranks take, `takes` batches of each per step."""
    optimizer = adamw(module)
    for step in range(STEPS):
        for rank in range(ranks):
            for index in range(takes):
                (module(batch(rank, takes * step + index)) / ranks).backward()
        optimizer.step()
        optimizer.zero_grad()


def train(module: nn.Module, optimizer: torch.optim.Optimizer, rank: int, takes: int = 1) -> None:
    """Train on what this rank takes; gradients of several batches meet those of other ranks at the last."""
    for step in range(STEPS):
        for index in range(takes):
            if takes > 1:
                module.set_requires_gradient_sync(index == takes - 1)
            module(batch(rank, takes * step + index)).backward()
        optimizer.step()
        optimizer.zero_grad()


def by_zero(path: Path, rank: int) -> nn.Module:
    # Its package scripts functions as it is imported, which warns.
    from torch.distributed.optim import ZeroRedundancyOptimizer

    module = aotexport_runtime.load(path).train()
    optimizer = ZeroRedundancyOptimizer(module.parameters(), torch.optim.AdamW, lr=1e-2)
    train(DistributedDataParallel(module), optimizer, rank)
    return module


def by_units(units: str, takes: int = 1) -> Callable[[Path, int], nn.Module]:
    def way(path: Path, rank: int) -> nn.Module:
        # The joint graph, where calls are of the whole.
        module = sharded(aotexport_runtime.load(path, target="portable" if units == "whole" else "auto").train(), units)
        train(module, adamw(module), rank, takes)
        return module

    return way


def frozen(path: Path, rank: int) -> nn.Module:
    module = aotexport_runtime.load(path).train()
    module.blocks[0].requires_grad_(False)
    sharded(module, "blocks")
    train(module, adamw(module), rank)
    return module


def adapted(path: Path, rank: int) -> nn.Module:
    module = aotexport_runtime.load(path).train()
    sharded(with_adapters(module), "blocks")
    train(module, adamw(module), rank)
    assert all(p.grad is None or p.requires_grad for p in module.parameters())
    return module


def tensor_parallel(path: Path, rank: int) -> nn.Module:
    """All ranks take the same rows, each with a part of the pairs of linear layers."""
    module = aotexport_runtime.load(path).train()
    mesh = dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))
    for block in module.blocks:
        parallelize_module(block, mesh, {"feed.0": ColwiseParallel(), "feed.2": RowwiseParallel()})
    train(module, adamw(module), 0)
    return module


def with_adapters(module: nn.Module) -> nn.Module:
    torch.manual_seed(1)
    adapters.add_lora(module, ["mix", "feed.0"], r=2, alpha=4)
    return module


def expected(path: Path, way: str, ranks: int) -> dict[str, torch.Tensor]:
    """Return what one process reaches on the joined batch."""
    module = with_adapters(aotexport_runtime.load(path).train()) if way == "adapted" else make()
    if way == "frozen":
        module.blocks[0].requires_grad_(False)
    train_joined(module, 1 if way == "tensor_parallel" else ranks, 2 if way == "accumulated" else 1)
    return module.state_dict()


WAYS: dict[str, Callable[[Path, int], nn.Module]] = {
    "zero": by_zero,
    **{units: by_units(units) for units in UNITS},
    "accumulated": by_units("blocks", takes=2),
    "frozen": frozen,
    "adapted": adapted,
    "tensor_parallel": tensor_parallel,
}


def main(path: Path, rank: int, ranks: int, ways: list[str]) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{path.parent / 'store'}", rank=rank, world_size=ranks)
    for way in ways:
        found, wanted = state_of(WAYS[way](path, rank)), expected(path, way, ranks)
        torch.testing.assert_close(found, dict(wanted), rtol=0, atol=2e-6, msg=lambda text, way=way: f"{way}: {text}")
        print(way)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]).absolute(), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4:])
