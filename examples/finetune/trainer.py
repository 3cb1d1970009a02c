"""Trains a LoRA adapter on the bundle by Hugging Face's `Trainer`; with `--eager`, peft's on the original.

    torchrun --nproc-per-node 2 examples/finetune/trainer.py out/reader

The same arguments give the same losses on one rank, two or four, which divide the batch. Needs
`pip install '.[examples,trainers]'`.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

import peft
import torch
from deploy.plain import digits
from model import model
from torch import nn
from transformers import Trainer, TrainingArguments

from aotexport_runtime import adapters, ranks

TARGETS, RANK, HEAD, BATCH = ["query", "value", "feed.0"], 8, ["classifier"], 64


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
    network = ranks.load(bundle, matmul="torch")
    torch.manual_seed(2)
    adapters.add_lora(network, TARGETS, r=RANK, alpha=2 * RANK, modules_to_save=HEAD)
    return network


def loss_of(logits: torch.Tensor, labels: torch.Tensor, num_items_in_batch: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of the mean cross entropy of what all ranks take in a step."""
    return nn.functional.cross_entropy(logits, labels, reduction="sum") / num_items_in_batch


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("bundle", nargs="?", help="bundle of the network")
    parser.add_argument("--eager", action="store_true", help="train the original in its place")
    parser.add_argument("--adapter", default="adapter", help="where to write the adapter")
    parser.add_argument("--report", type=Path, help="write the losses as JSON")
    options = parser.parse_args()
    count = int(os.environ.get("WORLD_SIZE", "1"))
    settings: dict[str, Any] = {"num_train_epochs": 4, "learning_rate": 1e-2, "dataloader_drop_last": True}
    settings |= {"per_device_train_batch_size": BATCH // count, "use_cpu": True}  # on GPUs: not this, and not the next
    settings |= {"ddp_backend": "gloo"} if count > 1 else {}
    settings |= {"report_to": "none", "disable_tqdm": True, "dataloader_pin_memory": False, "save_strategy": "no"}
    arguments = TrainingArguments("run", logging_steps=1, seed=1, label_names=["labels"], **settings)
    network = adapted(None if options.eager else options.bundle)
    trainer = Trainer(network, arguments, train_dataset=rows(), compute_loss_func=loss_of)
    trainer.train()
    if not trainer.is_world_process_zero():
        return
    report = {"losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]}
    if options.eager:
        network.save_pretrained(options.adapter)
    else:
        adapters.save_adapter(network, options.adapter, force=True)
    if options.report:
        options.report.write_text(json.dumps(report), encoding="utf-8")


if __name__ == "__main__":
    main()
