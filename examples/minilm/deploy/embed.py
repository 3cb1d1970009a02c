"""Embeds sentences by the bundle. Needs aotexport_runtime, torch and tokenizers; not transformers."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from sentences import SENTENCES, tokenizer, tokens

import aotexport_runtime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("bundle", help="bundle of the encoder")
    parser.add_argument("tokenizer", help="tokenizer.json of the encoder")
    parser.add_argument("--report", type=Path, help="write the embeddings as JSON")
    options = parser.parse_args()
    encoder = aotexport_runtime.load(options.bundle).eval()
    with torch.no_grad():
        embeddings = encoder(**tokens(tokenizer(options.tokenizer), list(SENTENCES)))
    for row, sentence in zip(embeddings @ embeddings.T, SENTENCES, strict=True):
        print(" ".join(f"{similarity:5.2f}" for similarity in row), sentence)
    if options.report:
        options.report.write_text(json.dumps({"embeddings": embeddings.tolist()}), encoding="utf-8")


if __name__ == "__main__":
    main()
