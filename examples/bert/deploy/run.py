"""Trains the classifier from its bundle for a few steps, then runs it for inference.

Needs aotexport_runtime and torch; not transformers. `../eager.py` runs the original by the same functions.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from torch import nn

import aotexport_runtime

STEPS = 3


def sentences(count: int, longest: int) -> dict[str, torch.Tensor]:
    """Return padded random sentences; those that begin with an odd token are of class 1."""
    generator = torch.Generator().manual_seed(count)
    lengths = torch.randint(2, longest + 1, (count, 1), generator=generator)
    mask = (torch.arange(longest) < lengths).long()
    tokens = torch.randint(1, 256, (count, longest), generator=generator) * mask
    return {"input_ids": tokens, "attention_mask": mask, "labels": tokens[:, 0] % 2}


def fit(network: nn.Module) -> list[float]:
    """Train `network` in place; return the loss of every step. Seeds the dropout."""
    torch.manual_seed(1)
    network.train()
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-3)
    losses: list[float] = []
    for step in range(STEPS):
        loss = network(**sentences(6 + step, 12 + step)).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def classify(network: nn.Module) -> list[int]:
    """Return the likelier class of some sentences, by the program for inference."""
    network.eval()
    with torch.no_grad():
        return network(**sentences(5, 30)).logits.argmax(dim=-1).tolist()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("bundle", help="bundle of the classifier")
    parser.add_argument("--report", type=Path, help="write losses and predictions as JSON")
    options = parser.parse_args()
    network = aotexport_runtime.load(options.bundle)
    report = {"losses": fit(network), "predictions": classify(network)}
    print("losses " + ", ".join(f"{loss:.6f}" for loss in report["losses"]))
    if options.report:
        options.report.write_text(json.dumps(report), encoding="utf-8")


if __name__ == "__main__":
    main()
