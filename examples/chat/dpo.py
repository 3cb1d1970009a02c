"""Trains an adapter of a language model's bundle on preferred answers (DPO), without the model's code.

`python examples/chat/dpo.py bundle/ pairs.jsonl adapter/` takes rows of `prompt`, `chosen` and `rejected`. The policy
is a new adapter; what it must stay near is the model with the adapters that were active before, or with none.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from torch.nn import functional

import aotexport_runtime
from aotexport_runtime import adapters

Row = tuple[list[int], list[int]]
"""Tokens of a prompt, and of an answer to it."""


def scores(module: torch.nn.Module, rows: Sequence[Row]) -> torch.Tensor:
    """Return the log probability of each answer."""
    length = max(len(prompt) + len(answer) for prompt, answer in rows)
    ids, mask, counted = torch.zeros(3, len(rows), length, dtype=torch.long)
    for row, (prompt, answer) in enumerate(rows):
        end = len(prompt) + len(answer)
        ids[row, :end] = torch.tensor([*prompt, *answer])
        mask[row, :end], counted[row, len(prompt) : end] = 1, 1
    logits = module(input_ids=ids, attention_mask=mask)["logits"][:, :-1]
    found = -functional.cross_entropy(logits.transpose(1, 2), ids[:, 1:], reduction="none")
    return (found * counted[:, 1:]).sum(1)


def dpo_loss(
    module: torch.nn.Module,
    chosen: Sequence[Row],
    rejected: Sequence[Row],
    reference: Sequence[str] = (),
    beta: float = 0.1,
) -> torch.Tensor:
    """Return the loss of the active adapter beside the adapters `reference` (Rafailov et al. 2023, equation 7)."""
    rows = [*chosen, *rejected]
    with torch.no_grad(), adapters.use_adapter(module, [*reference]):
        before = scores(module, rows)
    better, worse = (scores(module, rows) - before).chunk(2)
    return -functional.logsigmoid(beta * (better - worse)).mean()


def main(bundle: str, data: str, output: str) -> None:
    """Train for an epoch, and write the adapter."""
    from tokenizers import Tokenizer

    module = aotexport_runtime.load(bundle).train()
    tokenizer = Tokenizer.from_file(str(Path(bundle, "tokenizer", "tokenizer.json")))
    rows = [json.loads(line) for line in Path(data).read_text().splitlines()]
    adapters.add_lora(module, r=8, name="policy")
    optimizer = torch.optim.AdamW([p for p in module.parameters() if p.requires_grad], lr=1e-3)
    for begin in range(0, len(rows), 4):
        answers = [
            [(tokenizer.encode(row["prompt"]).ids, tokenizer.encode(row[kind]).ids) for row in rows[begin : begin + 4]]
            for kind in ("chosen", "rejected")
        ]
        loss = dpo_loss(module, *answers)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"{loss.item():.4f}")
    adapters.save_adapter(module, output, name="policy", force=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
