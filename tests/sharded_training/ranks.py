"""Bundles trained with state in parts over ranks, or whole on each, beside eager in one process on the joined batch.

Run as `python -m tests.sharded_training.ranks DIRECTORY RANK WORLD_SIZE WAY ...` once per rank: prints what was
compared, or fails.
"""

import contextlib
import functools
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


def adamw(module: nn.Module, way: str = "") -> torch.optim.Optimizer:
    """Return an optimizer; it would make much of what bfloat16 rounds, and there it is SGD."""
    trained = [p for p in module.parameters() if p.requires_grad]
    return torch.optim.SGD(trained, lr=0.1) if way == "mixed_precision" else torch.optim.AdamW(trained, lr=1e-2)


def taken(way: str, rank: int, ranks: int, step: int) -> list[torch.Tensor]:
    """Return the batches that a rank takes in a step; none where its data ended before those of the others."""
    if way == "join" and (rank, step) == (ranks - 1, STEPS - 1):
        return []
    takes = 2 if way in ("accumulated", "no_sync") else 1
    return [batch(rank, takes * step + index) for index in range(takes)]


def loss_of(module: nn.Module, tokens: torch.Tensor, way: str) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16, enabled=way == "mixed_precision"):
        return module(tokens)


def train_joined(module: nn.Module, ranks: int, way: str) -> None:
    """Train one process on what all ranks take; a rank whose data ended counts as one without gradients."""
    optimizer = adamw(module, way)
    for step in range(STEPS):
        for rank in range(ranks):
            for tokens in taken(way, rank, ranks, step):
                (loss_of(module, tokens, way) / ranks).backward()
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


def data_parallel(way: str, path: Path, rank: int) -> nn.Module:
    """Train what each rank has whole; gradients of several batches meet those of other ranks at the last."""
    module = aotexport_runtime.load(path).train()
    module.unused.requires_grad_(way.endswith("unused_parameters"))
    parallel, optimizer = DistributedDataParallel(module, **DATA_PARALLEL[way]), adamw(module, way)
    with parallel.join() if way == "join" else contextlib.nullcontext():
        for step in range(STEPS):
            batches = taken(way, rank, dist.get_world_size(), step)
            for tokens in batches:
                with contextlib.nullcontext() if tokens is batches[-1] else parallel.no_sync():
                    loss_of(parallel, tokens, way).backward()
            if batches:
                optimizer.step()
                optimizer.zero_grad()
    return module


DATA_PARALLEL: dict[str, dict[str, bool]] = {
    "data_parallel": {},
    "static_graph": {"static_graph": True},
    "static_graph_with_unused_parameters": {"static_graph": True},
    "find_unused_parameters": {"find_unused_parameters": True},
    "gradient_as_bucket_view": {"gradient_as_bucket_view": True},
    **{way: {} for way in ("no_sync", "mixed_precision", "join")},
}
"""Ways to train by `DistributedDataParallel`, with its options."""


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
    train_joined(module, 1 if way == "tensor_parallel" else ranks, way)
    return module.state_dict()


WAYS: dict[str, Callable[[Path, int], nn.Module]] = {
    "zero": by_zero,
    **{units: by_units(units) for units in UNITS},
    "accumulated": by_units("blocks", takes=2),
    "frozen": frozen,
    "adapted": adapted,
    "tensor_parallel": tensor_parallel,
    **{way: functools.partial(data_parallel, way) for way in DATA_PARALLEL},
}


def main(path: Path, rank: int, ranks: int, ways: list[str]) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{path.parent / 'store'}", rank=rank, world_size=ranks)
    for way in ways:
        found, wanted = state_of(WAYS[way](path, rank)), expected(path, way, ranks)
        # In bfloat16 a sum over ranks is rounded elsewhere than one over rows.
        atol = 1e-3 if way == "mixed_precision" else 2e-6
        torch.testing.assert_close(found, dict(wanted), rtol=0, atol=atol, msg=lambda text, way=way: f"{way}: {text}")
        print(way)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]).absolute(), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4:])
