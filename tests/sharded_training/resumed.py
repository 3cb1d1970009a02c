"""A run of one bundle that saves checkpoints, may be killed, and is resumed on any number of ranks.

Run as `python -m tests.sharded_training.resumed DIRECTORY RANK WORLD_SIZE CHECKPOINTS KILLED_AT` once per rank: the
last rank kills itself before step `KILLED_AT`, unless that is 0. Prints step and loss of the joined batch, a line each.
"""

import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from aotexport_runtime import ranks as on_ranks
from tests.sharded_training.models import batch
from tests.sharded_training.ranks import adamw, sharded

STEPS, EVERY = 60, 7


def main(path: Path, rank: int, ranks: int, checkpoints: Path, killed_at: int) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{path.parent / 'store'}", rank=rank, world_size=ranks)
    module = sharded(on_ranks.load(path).train(), "blocks")
    optimizer = adamw(module)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    state = on_ranks.TrainingState(module, optimizer, schedule=schedule)
    for step in range(state.resume(checkpoints), STEPS):
        if step == killed_at and killed_at and rank == ranks - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        loss = module(batch(0, step).chunk(ranks)[rank])
        loss.backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        joined = loss.detach().clone()
        dist.all_reduce(joined)
        print(step, joined.item() / ranks, flush=True)
        state.step = step + 1
        if state.step % EVERY == 0:
            state.save(checkpoints, background=True)
    state.wait()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]).absolute(), int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]), int(sys.argv[5]))
