"""Lightning's `Trainer` over a loaded bundle, unmodified, beside the same run of the model."""

from pathlib import Path

import lightning
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.utils.data import DataLoader
from torchmetrics.classification import MulticlassAccuracy

from aotexport_runtime import load
from tests.trainers.digits import CLASSES, Classifier, pixels

pytestmark = [
    # What Lightning says of loaders without workers, loggers, folders and more.
    pytest.mark.filterwarnings("ignore::UserWarning:lightning"),
    # Lightning 2.6 uses torch's pytrees as they were.
    pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec.` is deprecated:FutureWarning"),
]


class Training(lightning.LightningModule):
    """The usual one: a model, a loss, metrics, an optimizer with a schedule."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.accuracy = MulticlassAccuracy(CLASSES)
        self.losses: list[float] = []

    def training_step(self, batch, index):
        images, labels = batch
        loss = nn.functional.cross_entropy(self.model(images), labels)
        self.losses.append(loss.item())
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, index):
        images, labels = batch
        self.accuracy(self.model(images), labels)
        self.log("accuracy", self.accuracy, on_epoch=True)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)}

    def train_dataloader(self):
        return DataLoader(pixels(0, 256), batch_size=64, shuffle=True)

    def val_dataloader(self):
        return DataLoader(pixels(256, 384), batch_size=64)


def fit(model: nn.Module, directory: Path, epochs: int, resume: Path | None = None):
    """Train; return what was trained, its trainer and its checkpoints."""
    lightning.seed_everything(1, verbose=False)
    training = Training(model)
    best = ModelCheckpoint(directory, filename="best", monitor="accuracy", mode="max", save_last=True)
    trainer = lightning.Trainer(
        max_epochs=epochs,
        default_root_dir=directory,
        callbacks=[best],
        logger=CSVLogger(directory),
        log_every_n_steps=1,
    )
    trainer.fit(training, ckpt_path=resume)
    return training, trainer, best


def numbers(metrics: dict[str, torch.Tensor]) -> dict[str, float]:
    return {name: value.item() for name, value in metrics.items()}


def test_lightning_trains_validates_and_keeps_the_best_as_with_the_model(classifier, tmp_path):
    expected, of_model, best_of_model = fit(Classifier(), tmp_path / "model", epochs=3)
    training, trainer, best = fit(load(classifier), tmp_path / "bundle", epochs=3)
    assert training.losses == pytest.approx(expected.losses, rel=1e-4)
    assert numbers(trainer.callback_metrics) == pytest.approx(numbers(of_model.callback_metrics), rel=1e-4)
    assert best.best_model_score == best_of_model.best_model_score
    assert trainer.validate(training, ckpt_path="best") == of_model.validate(expected, ckpt_path="best")


def test_lightning_resumes_a_bundle_from_checkpoints_of_the_bundle_and_of_the_model(classifier, tmp_path):
    _, _, of_model = fit(Classifier(), tmp_path / "model", epochs=2)
    _, _, of_bundle = fit(load(classifier), tmp_path / "bundle", epochs=2)
    expected, _, _ = fit(Classifier(), tmp_path / "0", epochs=3, resume=of_model.last_model_path)
    for directory, stopped in (("1", of_bundle), ("2", of_model)):
        resumed, trainer, _ = fit(load(classifier), tmp_path / directory, epochs=3, resume=stopped.last_model_path)
        assert trainer.current_epoch == 3
        assert resumed.losses == pytest.approx(expected.losses, rel=1e-4)
    assert len(expected.losses) == 4
