"""Trains and serves the original network in eager mode, as a twin to compare the bundle with."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from deploy.train import TEST_SIZE, accuracy, digits, fit, predict
from model import model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--report", type=Path, help="write losses, predictions and accuracy as JSON")
    options = parser.parse_args()
    images, labels = digits()
    network = model()
    losses = fit(network, images[:-TEST_SIZE], labels[:-TEST_SIZE])
    predictions = predict(network, images[-TEST_SIZE:])
    report = {
        "losses": losses,
        "accuracy": accuracy(predictions, labels[-TEST_SIZE:]),
        "predictions": predictions.tolist(),
    }
    print(f"last loss {losses[-1]:.6f}, accuracy {report['accuracy']:.2%}")
    if options.report:
        options.report.write_text(json.dumps(report), encoding="utf-8")


if __name__ == "__main__":
    main()
