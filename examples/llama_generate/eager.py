"""Generates by the original language model, which reads all tokens anew for every next one."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from deploy.run import COUNT, prompts
from model import network
from transformers import LlamaForCausalLM


def generate(original: LlamaForCausalLM, tokens: torch.Tensor) -> torch.Tensor:
    """Return `tokens`, int64 (batch, length), with the `COUNT` likeliest tokens after them."""
    with torch.no_grad():
        for _ in range(COUNT):
            logits = original(input_ids=tokens, use_cache=False).logits[:, -1]
            tokens = torch.cat([tokens, logits.argmax(dim=-1, keepdim=True)], dim=1)
    return tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--report", type=Path, help="write the tokens as JSON")
    options = parser.parse_args()
    original = network().eval()
    report = {"tokens": [generate(original, batch).tolist() for batch in prompts()]}
    print(report["tokens"][0][0])
    if options.report:
        options.report.write_text(json.dumps(report), encoding="utf-8")


if __name__ == "__main__":
    main()
