"""Fine-tunes the original language model in eager mode, as a twin to compare the bundle with."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from deploy.train import fit
from model import model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("text", type=Path, help="file to train on")
    parser.add_argument("--report", type=Path, help="write the losses as JSON")
    options = parser.parse_args()
    losses = fit(model(), options.text.read_bytes())
    print(f"last loss {losses[-1]:.6f}")
    if options.report:
        options.report.write_text(json.dumps({"losses": losses}), encoding="utf-8")


if __name__ == "__main__":
    main()
