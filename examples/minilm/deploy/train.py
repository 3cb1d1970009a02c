"""Fine-tunes the encoder from its bundle by contrast of paraphrases with the other sentences of a batch.

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

STEPS = 5
BATCH = 6
SCALE = 20.0


def fit(encoder: nn.Module, loaded: Tokenizer) -> list[float]:
    """Train `encoder` in place; return the loss of every step. Seeds the choice of pairs and the dropout."""
    torch.manual_seed(1)
    encoder.train()
    optimizer = torch.optim.AdamW(encoder.parameters(), lr=2e-5)
    losses: list[float] = []
    for _ in range(STEPS):
        pairs = [PAIRS[index] for index in torch.randperm(len(PAIRS))[:BATCH]]
        questions = encoder(**tokens(loaded, [first for first, _ in pairs]))
        answers = encoder(**tokens(loaded, [second for _, second in pairs]))
        loss = nn.functional.cross_entropy(questions @ answers.T * SCALE, torch.arange(BATCH))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("bundle", help="bundle of the encoder")
    parser.add_argument("tokenizer", help="tokenizer.json of the encoder")
    parser.add_argument("tuned", help="where to save the tuned bundle")
    parser.add_argument("--report", type=Path, help="write the losses as JSON")
    options = parser.parse_args()
    encoder = aotexport_runtime.load(options.bundle)
    losses = fit(encoder, tokenizer(options.tokenizer))
    for step, loss in enumerate(losses, start=1):
        print(f"step {step}: loss {loss:.6f}")
    aotexport_runtime.save(encoder, options.tuned, force=True)
    if options.report:
        options.report.write_text(json.dumps({"losses": losses}), encoding="utf-8")


if __name__ == "__main__":
    main()
