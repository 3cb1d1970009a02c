"""Trains all weights of the bundle by Lightning's `Trainer`; with `--eager`, those of the original.

The same arguments give the same losses. Needs the packages of `pip install '.[examples,trainers]'`.
"""

from __future__ import annotations

import argparse
import json
import logging
from pathlib import Path
from typing import Any

import lightning
import torch
from deploy.plain import accuracy, digits
from model import model
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import aotexport_runtime

EPOCHS, RATE = 4, 3e-3


class Training(lightning.LightningModule):
    """A network, its loss, and an optimizer whose rate falls."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network
        self.losses: list[float] = []

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        """Return the loss of a batch."""
        images, labels = batch
        loss = nn.functional.cross_entropy(self.network(images), labels)
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> Any:
        """Return AdamW, with a cosine over the epochs."""
        optimizer = torch.optim.AdamW(self.network.parameters(), lr=RATE)
        return [optimizer], [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("bundle", nargs="?", help="bundle of the network")
    parser.add_argument("--eager", action="store_true", help="train the original in its place")
    parser.add_argument("--tuned", default="tuned", help="where to save the tuned bundle")
    parser.add_argument("--report", type=Path, help="write losses and accuracy as JSON")
    options = parser.parse_args()
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    network = model() if options.eager else aotexport_runtime.load(options.bundle, matmul="torch")
    training = Training(network.train())
    batches = DataLoader(TensorDataset(*digits(below=10)), batch_size=64, shuffle=True)
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    torch.manual_seed(1)
    lightning.Trainer(max_epochs=EPOCHS, accelerator="cpu", devices=1, **quiet).fit(training, batches)
    report = {"losses": training.losses, "accuracy": accuracy(network, *digits(below=10))}
    print(f"last loss {training.losses[-1]:.6f}, accuracy {report['accuracy']:.2%}")
    if not options.eager:
        aotexport_runtime.save(network, options.tuned, force=True)
    if options.report:
        options.report.write_text(json.dumps(report), encoding="utf-8")


if __name__ == "__main__":
    main()
