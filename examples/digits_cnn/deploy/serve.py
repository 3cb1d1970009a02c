"""Serves the tuned bundle: classifies the test images. Needs aotexport_runtime, torch and scikit-learn."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from train import TEST_SIZE, accuracy, digits, predict

import aotexport_runtime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tuned", help="tuned bundle")
    parser.add_argument("--report", type=Path, help="write predictions and accuracy as JSON")
    options = parser.parse_args()
    images, labels = digits()
    network = aotexport_runtime.load(options.tuned)
    predictions = predict(network, images[-TEST_SIZE:])
    report = {"accuracy": accuracy(predictions, labels[-TEST_SIZE:]), "predictions": predictions.tolist()}
    print(f"{len(predictions)} test images, accuracy {report['accuracy']:.2%}")
    if options.report:
        options.report.write_text(json.dumps(report), encoding="utf-8")


if __name__ == "__main__":
    main()
