"""Trains all weights of the bundle on the ranks that `accelerate launch` starts; with `--eager`, those of the original.

    accelerate launch --multi_gpu --num_processes 2 examples/finetune/with_accelerate.py out/reader
    accelerate launch --config_file examples/finetune/fsdp.yaml examples/finetune/with_accelerate.py out/reader

The first line takes processors where there are no GPUs. The second parts the weights (FSDP version 2), which accelerate
has for GPUs alone. The same arguments give the same losses. Needs `pip install '.[examples,trainers]'`.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType, set_seed
from deploy.plain import digits
from model import model
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import aotexport_runtime
from aotexport_runtime import ranks

EPOCHS, RATE, BATCH = 4, 3e-3, 64


def fit(accelerator: Accelerator, network: nn.Module) -> tuple[nn.Module, list[float]]:
    """Train; return what accelerate has made of the network, and the loss of every step over all ranks."""
    optimizer = torch.optim.AdamW(network.parameters(), lr=RATE)
    rows = TensorDataset(*digits(below=10))
    batches = DataLoader(rows, batch_size=BATCH // accelerator.num_processes, shuffle=True)
    prepared, optimizer, batches = accelerator.prepare(network.train(), optimizer, batches)
    losses: list[float] = []
    for _ in range(EPOCHS):
        for images, labels in batches:
            loss = nn.functional.cross_entropy(prepared(images), labels)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(prepared.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(accelerator.gather(loss.detach()).mean().item())
    return accelerator.unwrap_model(prepared), losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("bundle", nargs="?", help="bundle of the network")
    parser.add_argument("--eager", action="store_true", help="train the original in its place")
    parser.add_argument("--tuned", default="tuned", help="where to save the tuned bundle")
    parser.add_argument("--report", type=Path, help="write the losses as JSON")
    options = parser.parse_args()
    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    network = model() if options.eager else ranks.load(options.bundle, matmul="torch")
    set_seed(1, device_specific=True)
    network, losses = fit(accelerator, network)
    in_parts = accelerator.distributed_type is DistributedType.FSDP
    if not options.eager and (in_parts or accelerator.is_main_process):
        aotexport_runtime.save(network, options.tuned, force=True)  # of weights in parts, every rank calls it
    if accelerator.is_main_process:
        print(f"last loss {losses[-1]:.6f} on {accelerator.num_processes} ranks")
        if options.report:
            options.report.write_text(json.dumps({"losses": losses}), encoding="utf-8")
    accelerator.end_training()


if __name__ == "__main__":
    main()
