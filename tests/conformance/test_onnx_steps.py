"""Training steps in ONNX Runtime: equal to eager's with an optimizer of torch, in processes without torch too."""

import json
import math
import subprocess
import sys

import numpy as np
import onnx_ir as ir
import pytest
import torch
from safetensors.numpy import save_file
from safetensors.torch import load_file as torch_file
from torch import nn

import aotexport
from aotexport import OnnxOptions
from aotexport.lower.onnx.in_place import written_over
from aotexport_runtime import load, selftest
from aotexport_runtime.engines.onnx.session import _infer_over
from examples.digits_cnn import model as digits_cnn
from examples.minilm import model as minilm

onnxruntime = pytest.importorskip("onnxruntime", reason="needs the extra `onnx`")
BATCH = torch.export.Dim("batch", min=2, max=64)


class Model(nn.Module):
    """Convolutions and batch statistics, a pool, attention, dropout, weights that are shared, and frozen."""

    def __init__(self):
        super().__init__()
        self.convolve = nn.Sequential(
            nn.Conv2d(2, 4, 3, stride=2, padding=1, dilation=2, groups=2, bias=False),
            nn.BatchNorm2d(4),
            nn.ConvTranspose2d(4, 6, 2, stride=2, groups=2),
            nn.MaxPool2d(2),
        )
        self.first, self.second, self.norm = nn.Linear(6, 6), nn.Linear(6, 6), nn.LayerNorm(6)
        self.second.weight = self.first.weight
        self.attend = nn.MultiheadAttention(6, 2, bias=False)  # Of keys, its gradient is zero but for rounding.
        self.frozen = nn.Linear(6, 4).requires_grad_(False)

    def forward(self, x, labels):
        pooled = nn.functional.avg_pool2d(self.convolve(x), 3, 1, 1, count_include_pad=False)
        pooled = nn.functional.adaptive_avg_pool2d(pooled, (3, 2))
        tokens = pooled.flatten(2).unflatten(1, (2, 3)).transpose(2, 3)
        attended = nn.functional.scaled_dot_product_attention(tokens, tokens.sin(), tokens, is_causal=True)
        rows = nn.functional.silu(attended.transpose(1, 2).flatten(2)).transpose(0, 1)
        hidden = self.norm(self.first(self.attend(rows, rows.sin(), rows, need_weights=False)[0].mean(0)))
        hidden = nn.functional.dropout(hidden * (1 + hidden.tanh().prod(1, True)), 0.2, self.training)
        hidden = nn.functional.dropout(nn.functional.gelu(self.second(hidden)), 0.5, self.training)
        return nn.functional.cross_entropy(self.frozen(hidden), labels, label_smoothing=0.1)


def drawn(seed, step, draw, shape):
    """Return the random numbers of a draw, as their definition says."""

    def mix(z):
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return z ^ (z >> np.uint64(31))

    with np.errstate(over="ignore"):
        key = mix(mix(mix(np.uint64(seed)) + np.uint64(step)) + np.uint64(draw))
        found = mix(key + np.arange(math.prod(shape), dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15))
    return torch.from_numpy((found >> np.uint64(40)).astype(np.float32) / 2**24).reshape(shape)


def test_nodes_that_read_old_state_run_before_one_that_writes_over_it():
    model = ir.from_onnx_text("""
        <ir_version: 9, opset_import: ["": 18]>
        step (float[8,8] x, float[8,8] a, float[8,8] b, float rate)
        => (float[8,8] a_after, float[8,8] b_after, float[8,8] negative) {
            y = MatMul (x, a)
            a_change = Mul (y, rate)
            a_after = Sub (a, a_change)
            turned = Transpose (a)
            b_grad = MatMul (y, turned)
            b_change = Mul (b_grad, rate)
            b_after = Sub (b, b_change)
            negative = Neg (a)
        }
    """)
    new = dict(zip("ab", model.graph.outputs, strict=False))
    names = {"a": "a", "b": "b", "optimizer['lr'][0]": "rate"}
    assert written_over(model, new, names) == ["a_after", "b_after"]
    options = onnxruntime.SessionOptions()
    options.execution_order = onnxruntime.ExecutionOrder.PRIORITY_BASED
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(ir.to_proto(model).SerializeToString(), options)
    a, b, x = np.random.default_rng(0).normal(size=(3, 8, 8)).astype(np.float32)
    y, rate = x @ a, np.float32(0.1)
    expected = a - y * rate, b - y @ a.T * rate, -a
    feeds = {"x": x, "a": a, "b": b, "rate": np.asarray(rate)}
    *_, negative = _infer_over(session, ["a_after", "b_after", "negative"], feeds, {"a_after": a, "b_after": b})
    np.testing.assert_allclose([a, b, negative], expected, rtol=1e-5, atol=1e-5)


def batches(count):
    for seed in range(count):
        generator = torch.Generator().manual_seed(seed)
        size = 5 + seed % 2
        yield torch.randn(size, 2, 8, 8, generator=generator), torch.randint(4, (size,), generator=generator)


# Without torch: whole epochs, stopped and resumed by one file, and the weights to another.
WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None
import numpy, os
from safetensors.numpy import load_file, save_file
from aotexport_runtime import load
path, first, last = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
module = load(path + "/bundle")
module.state.update(load_file(path + "/run") if first else {})
stepper = module.stepper(lr=0.01, max_norm=None if sys.argv[4] == "None" else float(sys.argv[4]), seed=7)
batches = load_file(path + "/batches")
print([float(stepper(batches[f"x{i}"], batches[f"labels{i}"])) for i in range(first, last)])
save_file(module.state, path + "/run")
save_file(stepper.state_dict(), path + "/tuned")
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("step", "optimizer", "options", "max_norm"),
    [
        ("adamw:weight_decay=0.1,clip=True", torch.optim.AdamW, {"weight_decay": 0.1}, 0.5),
        ("sgd:momentum=0.9,nesterov=True", torch.optim.SGD, {"momentum": 0.9, "nesterov": True}, None),
    ],
)
def test_steps_without_torch_are_those_of_torch(tmp_path, monkeypatch, step, optimizer, options, max_norm):
    torch.manual_seed(0)
    model, given = Model(), list(batches(20))
    sizes = {"x": {0: BATCH}, "labels": {0: BATCH}}
    more = {
        "programs": ("train", "infer"),
        "dynamic_shapes": sizes,
        "step": step,
        "onnx": OnnxOptions(programs=("step",)),
    }
    report = aotexport.export(model, given[0], output=tmp_path / "bundle", **more)
    assert not report.notes
    assert all(result.agrees for result in selftest(tmp_path / "bundle"))
    arrays = {f"x{i}": x.numpy() for i, (x, _) in enumerate(given)}
    save_file(arrays | {f"labels{i}": labels.numpy() for i, (_, labels) in enumerate(given)}, tmp_path / "batches")
    found = []
    for first, last in ((0, 8), (8, 20)):
        command = [sys.executable, "-c", WITHOUT_TORCH, str(tmp_path), str(first), str(last), str(max_norm)]
        done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path)
        found += json.loads(done.stdout)
    theirs = optimizer([each for each in model.train().parameters() if each.requires_grad], lr=0.01, **options)
    places = ((count, draw) for count in range(20) for draw in range(2))
    dropout = lambda x, p, training: x * (drawn(7, *next(places), x.shape) >= p) / (1 - p)  # noqa: E731
    monkeypatch.setattr(nn.functional, "dropout", dropout)
    for batch, ours in zip(given, found, strict=True):
        theirs.zero_grad()
        loss = model(*batch)
        loss.backward()
        if max_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        theirs.step()
        assert ours == pytest.approx(loss.item(), rel=1e-4)
    module = load(tmp_path / "bundle", target="autograd")
    module.load_state_dict(torch_file(tmp_path / "tuned"), strict=False)
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(module.state_dict()[name], tensor, rtol=1e-4, atol=1e-5)


class Digits(nn.Module):
    def __init__(self):
        super().__init__()
        self.network = digits_cnn.model()

    def forward(self, x, labels):
        return nn.functional.cross_entropy(self.network(x), labels)


class Sentences(nn.Module):
    """MiniLM, which learns to say how alike two halves of its sentences are."""

    def __init__(self):
        super().__init__()
        self.encoder = minilm.model()

    def forward(self, x, labels):
        one, other = self.encoder(x, (x != 0).long()).chunk(2)
        return nn.functional.mse_loss((one * other).sum(1), labels)


KILLED = """
import sys
sys.modules["torch"] = None
import os
from safetensors.numpy import load_file, save_file
from aotexport_runtime import load
path, run = sys.argv[1], sys.argv[2]
module, data = load(path + "/bundle"), load_file(path + "/batch")
module.state.update(load_file(run) if os.path.exists(run) else {})
stepper = module.stepper(lr=1e-3, seed=7)
for _ in range(12):
    loss = stepper(**data)
    save_file({**module.state, "loss": loss}, run + ".part")
    os.replace(run + ".part", run)
    print(int(module.state["optimizer['count']"]), float(loss), flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("make", [Digits, Sentences])
def test_examples_learn_without_torch_killed_or_not(tmp_path, make):
    x = torch.rand(16, 1, 8, 8) if make is Digits else torch.randint(999, 30522, (8, 12))
    labels = torch.arange(16) % 10 if make is Digits else torch.tensor([1.0, 0.0, 1.0, 0.0])
    options = {"step": "adamw", "onnx": OnnxOptions(programs=("step",)), "programs": ("train",), "verify": False}
    aotexport.export(make(), (x, labels), output=tmp_path / "bundle", **options)
    save_file({"x": x.numpy(), "labels": labels.numpy()}, tmp_path / "batch")
    command = [sys.executable, "-c", KILLED, str(tmp_path)]
    whole = subprocess.run([*command, str(tmp_path / "whole")], capture_output=True, text=True, check=True).stdout
    with subprocess.Popen([*command, str(tmp_path / "run")], stdout=subprocess.PIPE, text=True) as killed:
        assert killed.stdout is not None
        before = [killed.stdout.readline() for _ in range(4)]
        killed.kill()
    after = subprocess.run([*command, str(tmp_path / "run")], capture_output=True, text=True, check=True).stdout
    expected = dict(line.split() for line in whole.splitlines())
    found = dict(line.split() for line in (*before, *after.splitlines()))
    assert expected.items() <= found.items()
    assert float(expected["12"]) < 0.7 * float(expected["1"])
    tuned = load(tmp_path / "bundle")
    weights = {name: tensor for name, tensor in torch_file(tmp_path / "whole").items() if name in tuned.state_dict()}
    tuned.load_state_dict(weights, strict=False)
    assert weights.keys() >= dict(tuned.named_parameters()).keys()
