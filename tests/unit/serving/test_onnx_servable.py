"""A servable by ONNX Runtime: the same answers, the same proof, and no torch in the process."""

import json
import shutil
import subprocess
import sys

import numpy as np
import pytest
import safetensors.numpy
import torch

from aotexport_runtime.bundle.read import open_bundle
from aotexport_runtime.errors import CallInvalid, SelfTestFailed
from aotexport_runtime.serving.servable import Servable
from tests.golden.refuse import seal
from tests.unit.serving.conftest import BATCH, digits_model

pytest.importorskip("onnxruntime", reason="needs the extra `onnx`")


@pytest.fixture(scope="module")
def bundle(new_bundle):
    args = (torch.linspace(-1, 1, 40).reshape(5, 8),)
    return new_bundle(digits_model(), *args, dynamic_shapes=({0: BATCH},), programs=("infer",), onnx=True)


def eager(x):
    with torch.no_grad():
        return digits_model()(torch.from_numpy(x)).numpy()


def test_answers_are_eagers_alone_and_joined(bundle):
    servable = Servable(bundle, engine="onnx", threads=1, max_latency_ms=50)
    servable.warm_up()
    assert servable.batch_axes.name == "batch"
    calls = [np.random.default_rng(seed).random((1 + seed % 3, 8), np.float32) for seed in range(12)]
    answers = [servable.submit({"input": x}) for x in calls]
    for x, answer in zip(calls, answers, strict=True):
        np.testing.assert_allclose(answer.result()["output"], eager(x), rtol=1e-5, atol=1e-6)
    assert max(answer.batch_size for answer in answers) > 3
    np.testing.assert_allclose(servable.infer({"input": calls[0]})["output"], eager(calls[0]), rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(servable.recorded_call()["input"].ravel(), torch.linspace(-1, 1, 40).numpy())


def test_call_outside_of_the_range_is_refused_by_the_bundles_guard(bundle):
    with pytest.raises(CallInvalid, match=r"`batch` is 65, outside \[1:64\]"):
        Servable(bundle, engine="onnx").infer({"input": np.zeros((65, 8), np.float32)})


def test_value_that_onnx_runtime_refuses_is_the_callers_fault_and_a_bug_is_not(new_bundle, monkeypatch):
    table = new_bundle(torch.nn.Embedding(4, 2), torch.tensor([1, 3]), programs=("infer",), onnx=True)
    servable = Servable(table, engine="onnx")
    with pytest.raises(ValueError, match="out of data bounds"):
        servable.infer({"input": np.array([1, 9])})
    monkeypatch.setattr("aotexport_runtime.engines.onnx.engine.OnnxEngine.run", lambda self, *args: self.misspelt)
    with pytest.raises(AttributeError, match="misspelt"):
        servable.infer({"input": np.array([1, 3])})


def test_model_that_answers_otherwise_than_eager_is_not_served(bundle, tmp_path):
    place = shutil.copytree(bundle, tmp_path / "changed")
    entry = open_bundle(bundle).manifest.testvectors[0]
    values = safetensors.numpy.load_file(place / entry.tensors)
    record = json.loads((place / entry.record).read_text())
    values[f"v{record['values'].index('call 0: output')}"] += 1
    safetensors.numpy.save_file(values, place / entry.tensors)
    seal(place)
    with pytest.raises(SelfTestFailed, match=r"infer/example \(onnx\): call 0: output: relative error"):
        Servable(place, engine="onnx").warm_up()


def test_no_torch_is_needed(bundle):
    code = """
import sys
sys.modules["torch"] = None
import numpy as np
from aotexport_runtime import Servable
servable = Servable(sys.argv[1])
servable.warm_up()
print(servable.submit({"input": np.zeros((2, 8), np.float32)}).result()["output"].tolist())
"""
    done = subprocess.run([sys.executable, "-c", code, bundle], capture_output=True, text=True, check=True)
    np.testing.assert_allclose(json.loads(done.stdout), eager(np.zeros((2, 8), np.float32)), rtol=1e-5, atol=1e-6)
