"""A server of ONNX models in processes that have no torch."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch
import tritonclient.grpc as triton_grpc

import aotexport
from tests.serving.server import serving
from tests.unit.serving.conftest import BATCH, digits_model

pytest.importorskip("onnxruntime", reason="needs the extra `onnx`")


def test_server_without_torch_answers_as_eager(tmp_path, monkeypatch):
    args = (torch.linspace(-1, 1, 40).reshape(5, 8),)
    place = tmp_path / "models/digits/1"
    options = {"dynamic_shapes": ({0: BATCH},), "programs": ("infer",), "verify": False, "onnx": True}
    aotexport.export(digits_model(), args, output=place, **options)
    (tmp_path / "site").mkdir()
    (tmp_path / "site/sitecustomize.py").write_text("import sys\nsys.modules['torch'] = None\n")
    with serving(tmp_path / "models", before=tmp_path / "site") as server:
        server.wait_until_ready()
        x = np.random.default_rng(0).random((4, 8), np.float32)
        with triton_grpc.InferenceServerClient(server.grpc) as client:
            tensor = triton_grpc.InferInput("input", x.shape, "FP32")
            tensor.set_data_from_numpy(x)
            got = client.infer("digits", [tensor]).as_numpy("output")
        with torch.no_grad():
            np.testing.assert_allclose(got, digits_model()(torch.from_numpy(x)).numpy(), rtol=1e-5, atol=1e-6)
        assert server.ask("/ui/models/digits/recorded")[0] == 200
        inputs = [{"name": "input", "shape": [65, 8], "datatype": "FP32", "data": [0] * 520}]
        status, found, _ = server.ask("/v2/models/digits/infer", {"inputs": inputs})
        assert (status, found["error"].endswith("`batch` is 65, outside [1:64]")) == (400, True)
        (worker,) = server.workers()
        maps = Path(f"/proc/{worker}/maps").read_text()
        assert "libtorch" not in maps
        assert "onnxruntime" in maps
        print(int(Path(f"/proc/{worker}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") >> 20, "MiB")
