"""Embeds sentences by the bundle's ONNX model. Needs aotexport_runtime, onnxruntime and tokenizers; not torch."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

import aotexport_runtime

SENTENCES = ("A bundle holds a model as data.", "Rain is likely tonight.", "Numbers.")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("bundle", help="bundle of the encoder, exported with --onnx")
    parser.add_argument("tokenizer", help="tokenizer.json of the encoder")
    parser.add_argument("--report", type=Path, help="write tokens and embeddings as JSON")
    options = parser.parse_args()
    tokenizer = Tokenizer.from_file(options.tokenizer)
    tokenizer.enable_padding()
    encodings = tokenizer.encode_batch(list(SENTENCES))
    tokens = {
        "input_ids": np.array([encoding.ids for encoding in encodings]),
        "attention_mask": np.array([encoding.attention_mask for encoding in encodings]),
    }
    embeddings = aotexport_runtime.load(options.bundle, target="onnx")(**tokens)
    for row, sentence in zip(embeddings @ embeddings.T, SENTENCES, strict=True):
        print(" ".join(f"{similarity:5.2f}" for similarity in row), sentence)
    if options.report:
        report = {name: value.tolist() for name, value in {**tokens, "embeddings": embeddings}.items()}
        options.report.write_text(json.dumps(report), encoding="utf-8")


if __name__ == "__main__":
    main()
