"""Adapters beside a version: a request names the one that it applies, and a new one is served without a stop."""

from __future__ import annotations

import shutil

import numpy as np
import pytest
import torch

import aotexport_runtime
from aotexport_runtime import adapters
from tests.serving.server import serving, wait_for

X = np.linspace(-1, 1, 16, dtype=np.float32).reshape(2, 8)


def body(adapter=None):
    tensor = {"name": "input", "datatype": "FP32", "shape": [2, 8], "data": X.ravel().tolist()}
    return {"inputs": [tensor], **({"parameters": {"adapter": adapter}} if adapter else {})}


def test_request_is_answered_with_the_adapter_that_it_names(exported, tmp_path):
    version = tmp_path / "models" / "digits" / "1"
    shutil.copytree(exported("digits"), version)
    module = aotexport_runtime.load(version).eval()
    base = module(torch.from_numpy(X)).detach().flatten().tolist()
    adapters.add_lora(module, r=2, alpha=16)
    for parameter in module.parameters():
        if parameter.requires_grad:
            torch.nn.init.ones_(parameter)
    tuned = module(torch.from_numpy(X)).detach().flatten().tolist()
    with serving(tmp_path / "models") as server:
        server.wait_until_ready()
        adapters.save_adapter(module, tmp_path / "german")
        shutil.copytree(tmp_path / "german", version.with_name("1.adapters") / "german")
        path = "/v2/models/digits/infer"
        wait_for(lambda: server.ask(path, body("german"))[0] == 200, server)
        for adapter, expected in ((None, base), ("german", tuned)):
            answer = server.ask(path, body(adapter))[1]["outputs"][0]["data"]
            assert answer == pytest.approx(expected, rel=1e-5, abs=1e-6)
        status, refusal, *_ = server.ask(path, body("dutch"))
        assert status == 400
        assert "there is no adapter `dutch`; there are `german`" in str(refusal)
