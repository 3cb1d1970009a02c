"""Puts a classifier of sentences on the encoder of a bundle, and trains both.

Needs aotexport_runtime, torch and tokenizers; not transformers. `../eager.py` trains the original by the same function.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from sentences import PAIRS, tokenizer, tokens
from tokenizers import Tokenizer
from torch import nn

import aotexport_runtime

STEPS = 4
QUESTION, STATEMENT = 1, 0


class Classifier(nn.Module):
    """An encoder of sentences with a head that tells questions from statements."""

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder = encoder
        torch.manual_seed(3)
        self.head = nn.Linear(384, 2)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        """Return logits `[batch, 2]` of tokens `[batch, sequence]`."""
        return self.head(self.encoder(input_ids=input_ids, attention_mask=attention_mask))


def fit_classes(encoder: nn.Module, loaded: Tokenizer) -> list[float]:
    """Train a classifier on `encoder`, which is changed in place; return the loss of every step."""
    sentences = [sentence for pair in PAIRS for sentence in pair]
    classes = torch.tensor([QUESTION if sentence.endswith("?") else STATEMENT for sentence in sentences])
    classifier = Classifier(encoder).train()
    optimizer = torch.optim.AdamW(classifier.parameters(), lr=1e-4)
    torch.manual_seed(4)
    losses: list[float] = []
    for _ in range(STEPS):
        loss = nn.functional.cross_entropy(classifier(**tokens(loaded, sentences)), classes)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("bundle", help="bundle of the encoder")
    parser.add_argument("tokenizer", help="tokenizer.json of the encoder")
    parser.add_argument("--report", type=Path, help="write the losses as JSON")
    options = parser.parse_args()
    losses = fit_classes(aotexport_runtime.load(options.bundle), tokenizer(options.tokenizer))
    for step, loss in enumerate(losses, start=1):
        print(f"step {step}: loss {loss:.6f}")
    if options.report:
        options.report.write_text(json.dumps({"losses": losses}), encoding="utf-8")


if __name__ == "__main__":
    main()
