"""A model and its bundle trained by Lightning in two processes, which Lightning starts.

Run as `python -m tests.trainers.lightning_run BUNDLE DIRECTORY STRATEGY`: writes the losses and the trained weights of
rank 0 to `DIRECTORY/found.pt`; without a BUNDLE (`-`), of the model.
"""

import os
import sys
from pathlib import Path

import lightning
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

from aotexport_runtime import load
from tests.trainers.digits import Classifier, pixels

RANKS = 2


class Training(lightning.LightningModule):
    """Means of losses over the ranks; with `ModelParallelStrategy`, weights in parts."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network
        self.losses: list[float] = []

    def configure_model(self) -> None:
        mesh = self.device_mesh
        if mesh is not None and not isinstance(next(self.network.parameters()), DTensor):
            for unit in (*map(self.network.get_submodule, ("0", "4")), self.network):
                fully_shard(unit, mesh=mesh["data_parallel"])

    def training_step(self, batch, index):
        images, labels = batch
        loss = nn.functional.cross_entropy(self.network(images), labels)
        self.losses.append(self.all_gather(loss.detach()).mean().item())
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def main(bundle: str, directory: Path, strategy: str) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    training = Training((Classifier() if bundle == "-" else load(bundle)).train())
    chosen = (
        ModelParallelStrategy(data_parallel_size=RANKS, tensor_parallel_size=1) if strategy == "fsdp2" else strategy
    )
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = lightning.Trainer(accelerator="cpu", devices=RANKS, strategy=chosen, max_epochs=2, **quiet)
    lightning.seed_everything(1, verbose=False)
    trainer.fit(training, DataLoader(pixels(0, 256), batch_size=32))
    state = training.network.state_dict()
    whole = {name: v.full_tensor() if isinstance(v, DTensor) else v for name, v in state.items()}
    if trainer.is_global_zero:
        torch.save({"losses": training.losses, "state": whole}, directory / "found.pt")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3])
