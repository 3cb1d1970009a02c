"""Trains all weights of a bundle on the digits 0 to 4, and saves the tuned bundle.

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


def digits(below: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return shuffled images `[n, 8, 8]` in [0, 1] of the digits below a number, with their labels."""
    data = load_digits()
    order = torch.randperm(len(data.target), generator=torch.Generator().manual_seed(0))
    images, labels = torch.tensor(data.images, dtype=torch.float32)[order] / 16, torch.tensor(data.target)[order]
    return images[labels < below], labels[labels < below]


def fit(network: nn.Module, images: torch.Tensor, labels: torch.Tensor, epochs: int, rate: float) -> list[float]:
    """Train what requires gradients, in place; return the mean loss of every epoch."""
    torch.manual_seed(1)
    network.train()
    optimizer = torch.optim.AdamW([p for p in network.parameters() if p.requires_grad], lr=rate)
    losses: list[float] = []
    for _ in range(epochs):
        total = 0.0
        for batch in torch.randperm(len(images)).split(64):
            loss = nn.functional.cross_entropy(network(images[batch]), labels[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.item() * len(batch)
        losses.append(total / len(images))
    return losses


def accuracy(network: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> float:
    """Return the fraction of right predictions."""
    network.eval()
    with torch.no_grad():
        return (network(images).argmax(dim=1) == labels).double().mean().item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("bundle", help="bundle of the untrained network")
    parser.add_argument("tuned", help="where to save the tuned bundle")
    parser.add_argument("--report", type=Path, help="write the losses as JSON")
    options = parser.parse_args()
    network = aotexport_runtime.load(options.bundle, matmul="torch")
    losses = fit(network, *digits(below=5), epochs=6, rate=3e-3)
    aotexport_runtime.save(network, options.tuned, force=True)
    report = {"losses": losses, "accuracy": accuracy(network, *digits(below=5))}
    print(f"last loss {losses[-1]:.6f}, accuracy {report['accuracy']:.2%}")
    if options.report:
        options.report.write_text(json.dumps(report), encoding="utf-8")


if __name__ == "__main__":
    main()
