"""Trains as fsdp.py does, with a checkpoint per epoch: started again, on any number of ranks, it goes on.

    torchrun --nproc-per-node 4 examples/finetune/deploy/resume.py out/reader out/five out/run --stop-after 2
    torchrun --nproc-per-node 2 examples/finetune/deploy/resume.py out/reader out/five out/run

Needs aotexport_runtime, torch and scikit-learn; not the network's code.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch.distributed as dist
from ddp import EPOCHS, adamw, fit
from fsdp import parted

import aotexport_runtime
from aotexport_runtime import ranks


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("bundle", help="bundle of the untrained network")
    parser.add_argument("tuned", help="where to save the tuned bundle")
    parser.add_argument("checkpoints", help="directory of the run's checkpoints")
    parser.add_argument("--stop-after", type=int, default=EPOCHS, help="epochs after which this process ends")
    parser.add_argument("--report", type=Path, help="write the losses of this process as JSON")
    chosen = parser.parse_args()
    dist.init_process_group("gloo")
    network = parted(ranks.load(chosen.bundle, matmul="torch", mapped=True).train())
    optimizer = adamw(network)
    state = ranks.TrainingState(network, optimizer)
    losses: list[float] = []
    for epoch in range(state.resume(chosen.checkpoints), chosen.stop_after):
        losses.append(fit(network, optimizer, epoch))
        state.step = epoch + 1
        state.save(chosen.checkpoints, background=True)
    state.wait()
    if chosen.stop_after == EPOCHS:
        aotexport_runtime.save(network, chosen.tuned, force=True)
    if dist.get_rank() == 0:
        print(f"losses {losses} of this process, on {dist.get_world_size()} ranks")
        if chosen.report:
            chosen.report.write_text(json.dumps(losses), encoding="utf-8")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
