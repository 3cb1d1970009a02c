"""Trains the language model from its bundle for a few steps, then runs it for inference.

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


def fit(network: nn.Module) -> list[float]:
    """Train `network` in place to count; return the loss of every step."""
    network.train()
    optimizer = torch.optim.AdamW(network.parameters(), lr=3e-3)
    losses: list[float] = []
    for step in range(STEPS):
        counts = (torch.arange(20 + step) + torch.arange(3 + step).unsqueeze(1)) % 256
        loss = network(input_ids=counts, labels=counts.clone()).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def next_tokens(network: nn.Module) -> list[int]:
    """Return the likeliest token after each of some counts, by the program for inference, without labels."""
    network.eval()
    counts = torch.arange(12) + torch.arange(5).unsqueeze(1)
    with torch.no_grad():
        return network(input_ids=counts).logits[:, -1].argmax(dim=-1).tolist()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("bundle", help="bundle of the language model")
    parser.add_argument("--report", type=Path, help="write losses and predictions as JSON")
    options = parser.parse_args()
    network = aotexport_runtime.load(options.bundle)
    report = {"losses": fit(network), "predictions": next_tokens(network)}
    print("losses " + ", ".join(f"{loss:.6f}" for loss in report["losses"]))
    if options.report:
        options.report.write_text(json.dumps(report), encoding="utf-8")


if __name__ == "__main__":
    main()
