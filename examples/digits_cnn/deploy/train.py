"""Trains the digits network from its bundle and saves the tuned bundle.

Needs aotexport_runtime, torch and scikit-learn; not the network's code. `../eager.py` trains the original by the same
functions.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import nn

import aotexport_runtime

EPOCHS = 6
BATCH = 64
TEST_SIZE = 360


def digits() -> tuple[torch.Tensor, torch.Tensor]:
    """Return 1,797 shuffled images `[n, 1, 8, 8]` in [0, 1] with their labels; the last `TEST_SIZE` are for tests."""
    data = load_digits()
    order = torch.randperm(len(data.target), generator=torch.Generator().manual_seed(0))
    images = torch.tensor(data.images, dtype=torch.float32)[order] / 16
    return images.unsqueeze(1), torch.tensor(data.target)[order]


def fit(network: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> list[float]:
    """Train `network` in place; return the mean loss of every epoch. Seeds the shuffling and the dropout."""
    torch.manual_seed(1)
    network.train()
    optimizer = torch.optim.AdamW(network.parameters(), lr=2e-3)
    losses: list[float] = []
    for _ in range(EPOCHS):
        total = 0.0
        for batch in torch.randperm(len(images)).split(BATCH):
            loss = nn.functional.cross_entropy(network(images[batch]), labels[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.item() * len(batch)
        losses.append(total / len(images))
    return losses


def predict(network: nn.Module, images: torch.Tensor) -> torch.Tensor:
    """Return the likeliest digit per image; in eval mode a bundle runs its program `infer`."""
    network.eval()
    with torch.no_grad():
        return network(images).argmax(dim=1)


def accuracy(predictions: torch.Tensor, labels: torch.Tensor) -> float:
    """Return the fraction of right predictions."""
    return (predictions == labels).double().mean().item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("bundle", help="bundle of the untrained network")
    parser.add_argument("tuned", help="where to save the tuned bundle")
    parser.add_argument("--report", type=Path, help="write the losses as JSON")
    options = parser.parse_args()
    images, labels = digits()
    network = aotexport_runtime.load(options.bundle)
    losses = fit(network, images[:-TEST_SIZE], labels[:-TEST_SIZE])
    for epoch, loss in enumerate(losses, start=1):
        print(f"epoch {epoch}: loss {loss:.6f}")
    aotexport_runtime.save(network, options.tuned, force=True)
    if options.report:
        options.report.write_text(json.dumps({"losses": losses}), encoding="utf-8")


if __name__ == "__main__":
    main()
