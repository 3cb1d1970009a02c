"""Teaches the tuned bundle all ten digits by a LoRA adapter and a new head, and writes the adapter in peft's files.

Needs aotexport_runtime, torch and scikit-learn; not the network's code, and not peft. `../eager.py` trains the original
by the same functions with peft.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from plain import accuracy, digits, fit

import aotexport_runtime
from aotexport_runtime import adapters

TARGETS, RANK, HEAD = ["query", "value", "feed.0"], 8, ["classifier"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("bundle", help="bundle that plain.py has tuned")
    parser.add_argument("adapter", help="where to write the adapter")
    parser.add_argument("--report", type=Path, help="write losses and accuracy as JSON")
    options = parser.parse_args()
    network = aotexport_runtime.load(options.bundle, matmul="torch")
    torch.manual_seed(2)
    print(adapters.add_lora(network, TARGETS, r=RANK, alpha=2 * RANK, modules_to_save=HEAD))
    losses = fit(network, *digits(below=10), epochs=12, rate=1e-2)
    report = {"losses": losses, "accuracy": accuracy(network, *digits(below=10))}
    print(f"last loss {losses[-1]:.6f}, accuracy {report['accuracy']:.2%}")
    adapters.save_adapter(network, options.adapter, force=True)
    with adapters.disable_adapters(network):
        report["accuracy_before"] = accuracy(network, *digits(below=5))
    if options.report:
        options.report.write_text(json.dumps(report), encoding="utf-8")


if __name__ == "__main__":
    main()
