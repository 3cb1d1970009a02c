"""Mistakes with state in parts over ranks.

Run as `python -m tests.sharded_training.refusals DIRECTORY RANK WORLD_SIZE MISTAKE ...` once per rank: prints the
errors.
"""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import aotexport_runtime
from aotexport_runtime import adapters
from aotexport_runtime import ranks as on_ranks
from tests.sharded_training.models import batch
from tests.sharded_training.ranks import adamw, sharded


def program_called(path: Path, rank: int) -> None:
    sharded(aotexport_runtime.load(path).train(), "blocks").program("train")(batch(rank, 0))


def other(path: Path, rank: int) -> Path:
    """Return a bundle of the same programs with other weights."""
    found = path.parent / "other"
    if rank == 0:
        module = aotexport_runtime.load(path)
        torch.nn.init.ones_(module.norm.bias)
        aotexport_runtime.save(module, found, force=True)
    dist.barrier()
    return found


def other_bundle(path: Path, rank: int) -> None:
    on_ranks.load([path, other(path, rank)][rank])


def no_bundle(path: Path, rank: int) -> None:
    on_ranks.load([path, path.parent / "nowhere"][rank])


def other_checkpoint(path: Path, rank: int) -> None:
    first, second = (sharded(on_ranks.load(each).train(), "blocks") for each in (path, other(path, rank)))
    state = on_ranks.TrainingState(first, adamw(first))
    state.step = 1
    state.save(path.parent / "checkpoints")
    on_ranks.TrainingState(second, adamw(second)).resume(path.parent / "checkpoints")


def adapter_of(path: Path, rank: int) -> Path:
    """Return an adapter that rank 0 has trained on the bundle at `path`."""
    found = path.parent / f"adapter of {path.name}"
    if rank == 0:
        module = aotexport_runtime.load(path)
        adapters.add_lora(module, ["blocks.0.mix"], r=2)
        adapters.save_adapter(module, found, force=True)
    dist.barrier()
    return found


def adapter_of_another_base(path: Path, rank: int) -> None:
    adapters.load_adapter(on_ranks.load(path), adapter_of(other(path, rank), rank))


def late_adapter(path: Path, rank: int) -> None:
    adapters.add_lora(sharded(on_ranks.load(path).train(), "blocks"), ["mix"])


def rows_that_do_not_divide(path: Path, rank: int) -> None:
    on_ranks.part(batch(0, 0))


def layers_that_do_not_divide(path: Path, rank: int) -> None:
    module = on_ranks.load(path).train()
    mesh = dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))
    for block in module.blocks:
        parallelize_module(block, mesh, {"feed.0": ColwiseParallel(), "feed.2": RowwiseParallel()})
    module(batch(0, 0))


MISTAKES = {
    function.__name__: function
    for function in (
        program_called,
        other_bundle,
        no_bundle,
        other_checkpoint,
        adapter_of_another_base,
        late_adapter,
        rows_that_do_not_divide,
        layers_that_do_not_divide,
    )
}


def main(path: Path, rank: int, ranks: int, mistakes: list[str]) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{path.parent / 'store'}", rank=rank, world_size=ranks)
    for mistake in mistakes:
        try:
            MISTAKES[mistake](path, rank)
        except aotexport_runtime.AotExportError as error:
            print(error)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]).absolute(), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4:])
