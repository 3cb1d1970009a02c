"""Runs the original language model in eager mode, as a twin to compare the bundle with."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from deploy.run import fit, next_tokens
from model import model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--report", type=Path, help="write losses and predictions as JSON")
    options = parser.parse_args()
    network = model()
    report = {"losses": fit(network), "predictions": next_tokens(network)}
    print("losses " + ", ".join(f"{loss:.6f}" for loss in report["losses"]))
    if options.report:
        options.report.write_text(json.dumps(report), encoding="utf-8")


if __name__ == "__main__":
    main()
