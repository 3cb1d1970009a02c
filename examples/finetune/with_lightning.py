"""Trains all weights of the bundle by Lightning's `Trainer`; with `--eager`, those of the original, to the same losses.

On two ranks: `with_lightning.py out/reader --ranks 2 --strategy fsdp`. Needs `pip install '.[examples,trainers]'`.
"""

from __future__ import annotations

import argparse
import json
import logging
from pathlib import Path
from typing import Any

import lightning
import torch
from deploy.plain import digits
from lightning.pytorch.strategies import ModelParallelStrategy
from model import model
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.utils.data import DataLoader, TensorDataset

import aotexport_runtime

EPOCHS, RATE, BATCH = 4, 3e-3, 64
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


class Training(lightning.LightningModule):
    """A network, its loss, and an optimizer whose rate falls."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network, self.losses = network, list[float]()

    def configure_model(self) -> None:
        """Part the weights over all ranks, if the strategy has a mesh of them."""
        if self.device_mesh is not None and not isinstance(self.network, FSDPModule):
            for unit in (*self.network.blocks, self.network):
                fully_shard(unit, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        """Return the loss of this rank's part of a batch."""
        loss = nn.functional.cross_entropy(self.network(batch[0]), batch[1])
        self.losses.append(self.trainer.strategy.reduce(loss.detach(), reduce_op="mean").item())
        return loss

    def configure_optimizers(self) -> Any:
        """Return AdamW, with a cosine over the epochs."""
        optimizer = torch.optim.AdamW(self.parameters(), lr=RATE)
        return [optimizer], [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("bundle", nargs="?", help="bundle of the network")
    parser.add_argument("--eager", action="store_true", help="train the original in its place")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--strategy", choices=["auto", "ddp", "fsdp"], default="auto")
    parser.add_argument("--tuned", default="tuned", help="where to save the tuned bundle")
    parser.add_argument("--report", type=Path, help="write the losses as JSON")
    options = parser.parse_args()
    network = model() if options.eager else aotexport_runtime.load(options.bundle, matmul="torch")
    training, in_parts = Training(network.train()), options.strategy == "fsdp"
    strategy = ModelParallelStrategy(options.ranks, tensor_parallel_size=1) if in_parts else options.strategy
    batches = DataLoader(TensorDataset(*digits(below=10)), batch_size=BATCH // options.ranks, shuffle=True)
    lightning.seed_everything(1, verbose=False)
    quiet: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = lightning.Trainer(max_epochs=EPOCHS, accelerator="cpu", devices=options.ranks, strategy=strategy, **quiet)
    trainer.fit(training, batches)
    if not options.eager and (in_parts or trainer.is_global_zero):
        aotexport_runtime.save(network, options.tuned, force=True)  # of weights in parts, every rank calls it
    if options.report and trainer.is_global_zero:
        options.report.write_text(json.dumps({"losses": training.losses}), encoding="utf-8")


if __name__ == "__main__":
    main()
