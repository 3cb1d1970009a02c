"""Fine-tunes the language model from its bundle. Needs aotexport_runtime and torch; not transformers.

`../eager.py` trains the original by the same function.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from torch import nn

import aotexport_runtime

STEPS = 20


def fit(network: nn.Module, text: bytes) -> list[float]:
    """Train `network` in place on pieces of `text`; return the loss of every step.

    Batch and sequence sizes change from step to step. Seeds the choice of pieces and the dropout.
    """
    torch.manual_seed(1)
    network.train()
    tokens = torch.tensor(list(text))
    optimizer = torch.optim.AdamW(network.parameters(), lr=2e-3, weight_decay=0.01)
    losses: list[float] = []
    for step in range(STEPS):
        batch, sequence = 4 + step % 5, 48 + 8 * (step % 7)
        starts = torch.randint(len(tokens) - sequence, (batch, 1))
        pieces = tokens[starts + torch.arange(sequence)]
        loss = network(input_ids=pieces, labels=pieces.clone()).loss
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("bundle", help="bundle of the language model")
    parser.add_argument("text", type=Path, help="file to train on")
    parser.add_argument("tuned", help="where to save the tuned bundle")
    parser.add_argument("--report", type=Path, help="write the losses as JSON")
    options = parser.parse_args()
    network = aotexport_runtime.load(options.bundle)
    losses = fit(network, options.text.read_bytes())
    for step, loss in enumerate(losses, start=1):
        print(f"step {step}: loss {loss:.6f}")
    aotexport_runtime.save(network, options.tuned, force=True)
    if options.report:
        options.report.write_text(json.dumps({"losses": losses}), encoding="utf-8")


if __name__ == "__main__":
    main()
