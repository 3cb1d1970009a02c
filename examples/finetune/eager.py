"""Trains the original network in eager mode, all of it and then with peft, as a twin to compare the bundle with."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import peft
import torch
from deploy.plain import accuracy, digits, fit
from model import model

TARGETS, RANK, HEAD = ["query", "value", "feed.0"], 8, ["classifier"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--adapter", type=Path, help="adapter that lora.py has written, to read it by peft")
    parser.add_argument("--report", type=Path, help="write losses and accuracies as JSON")
    options = parser.parse_args()
    network = model()
    report = {"losses": fit(network, *digits(below=5), epochs=6, rate=3e-3)}
    tuned = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    torch.manual_seed(2)
    config = peft.LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules=TARGETS, modules_to_save=HEAD)
    adapted = peft.get_peft_model(network, config)
    report["lora_losses"] = fit(adapted, *digits(below=10), epochs=12, rate=1e-2)
    report["accuracy"] = accuracy(adapted, *digits(below=10))
    if options.adapter:
        base = model()
        base.load_state_dict(tuned)
        read = peft.PeftModel.from_pretrained(base, options.adapter)
        report["read_accuracy"] = accuracy(read, *digits(below=10))
    print(f"last loss {report['lora_losses'][-1]:.6f}, accuracy {report['accuracy']:.2%}")
    if options.report:
        options.report.write_text(json.dumps(report), encoding="utf-8")


if __name__ == "__main__":
    main()
