"""Generates from the bundle: the prompt in one call, then a token per call, with keys and values handed on.

Needs aotexport_runtime and torch; not transformers. `../eager.py` generates by the original, without a cache.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from torch import nn

import aotexport_runtime

COUNT = 24


def generate(step: nn.Module, prompts: torch.Tensor) -> torch.Tensor:
    """Return `prompts`, int64 (batch, length), with the `COUNT` likeliest tokens after them."""
    nothing = torch.zeros(len(prompts), 2, 0, 16)
    past, new, tokens = [(nothing, nothing), (nothing, nothing)], prompts, prompts
    with torch.no_grad():
        for _ in range(COUNT):
            logits, past = step(new, past)
            new = logits.argmax(dim=-1, keepdim=True)
            tokens = torch.cat([tokens, new], dim=1)
    return tokens


def prompts() -> list[torch.Tensor]:
    """Return two batches of different sizes."""
    return [torch.arange(4).repeat(3, 1) + torch.arange(3).unsqueeze(1), torch.tensor([[7, 99, 3, 5, 200, 41, 6]])]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("bundle", help="bundle of the step")
    parser.add_argument("--report", type=Path, help="write the tokens as JSON")
    options = parser.parse_args()
    step = aotexport_runtime.load(options.bundle).eval()
    report = {"tokens": [generate(step, batch).tolist() for batch in prompts()]}
    print(report["tokens"][0][0])
    if options.report:
        options.report.write_text(json.dumps(report), encoding="utf-8")


if __name__ == "__main__":
    main()
