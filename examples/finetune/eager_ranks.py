"""Trains the original network in eager mode on several ranks, as a twin of `deploy/ddp.py` and `deploy/fsdp.py`.

torchrun --nproc-per-node 2 examples/finetune/eager_ranks.py fsdp
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from pathlib import Path

import torch.distributed as dist
from model import model

sys.path.insert(0, str(Path(__file__).parent / "deploy"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("way", choices=["ddp", "fsdp"])
    parser.add_argument("--report", type=Path, help="write the losses as JSON")
    chosen = parser.parse_args()
    dist.init_process_group("gloo")
    losses = importlib.import_module(chosen.way).train(model())
    if dist.get_rank() == 0:
        print(f"last loss {losses[-1]:.6f}")
        if chosen.report:
            chosen.report.write_text(json.dumps(losses), encoding="utf-8")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
