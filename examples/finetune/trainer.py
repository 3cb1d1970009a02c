"""Trains a LoRA adapter on the bundle by Hugging Face's `Trainer`; with `--eager`, peft's on the original.

The same arguments give the same losses. Needs the packages of `pip install '.[examples,trainers]'`.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import peft
import torch
from deploy.plain import accuracy, digits
from model import model
from torch import nn
from transformers import Trainer, TrainingArguments

import aotexport_runtime
from aotexport_runtime import adapters

TARGETS, RANK, HEAD = ["query", "value", "feed.0"], 8, ["classifier"]


def rows() -> list[dict[str, torch.Tensor]]:
    """Return an image and its label per row, as a data set of `datasets` gives them."""
    return [{"images": image, "labels": label} for image, label in zip(*digits(below=10), strict=True)]


def adapted(bundle: str | None) -> nn.Module:
    """Return the bundle with an adapter of the runtime; None: the original with one of peft."""
    if bundle is None:
        config = peft.LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules=TARGETS, modules_to_save=HEAD)
        network = model()
        torch.manual_seed(2)
        return peft.get_peft_model(network, config)
    network = aotexport_runtime.load(bundle, matmul="torch")
    torch.manual_seed(2)
    adapters.add_lora(network, TARGETS, r=RANK, alpha=2 * RANK, modules_to_save=HEAD)
    return network


def loss_of(logits: torch.Tensor, labels: torch.Tensor, **options: Any) -> torch.Tensor:
    """Return the mean cross entropy of a batch."""
    return nn.functional.cross_entropy(logits, labels)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("bundle", nargs="?", help="bundle of the network")
    parser.add_argument("--eager", action="store_true", help="train the original in its place")
    parser.add_argument("--adapter", default="adapter", help="where to write the adapter")
    parser.add_argument("--report", type=Path, help="write losses and accuracy as JSON")
    options = parser.parse_args()
    network = adapted(None if options.eager else options.bundle)
    settings: dict[str, Any] = {"num_train_epochs": 4, "per_device_train_batch_size": 64, "learning_rate": 1e-2}
    quiet = {"report_to": "none", "disable_tqdm": True, "dataloader_pin_memory": False, "save_strategy": "no"}
    arguments = TrainingArguments("run", logging_steps=1, seed=1, label_names=["labels"], **settings, **quiet)
    trainer = Trainer(network, arguments, train_dataset=rows(), compute_loss_func=loss_of)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    report = {"losses": losses, "accuracy": accuracy(network, *digits(below=10))}
    print(f"last loss {losses[-1]:.6f}, accuracy {report['accuracy']:.2%}")
    if options.eager:
        network.save_pretrained(options.adapter)
    else:
        adapters.save_adapter(network, options.adapter, force=True)
    if options.report:
        options.report.write_text(json.dumps(report), encoding="utf-8")


if __name__ == "__main__":
    main()
