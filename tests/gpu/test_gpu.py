"""Bundles with kernels on a GPU: code loads and launches, results are eager's, whatever option runs them.

Without the exporter (another torch than it works with), on bundles that were built elsewhere; see docs/gpu.md.
"""

import logging
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from aotexport_runtime import CudaRuntime, load, open_bundle, selftest
from aotexport_runtime.bundle.packs import TARGET, code_of, unpacked
from aotexport_runtime.engines.cuda import engine, tuning
from aotexport_runtime.engines.cuda.choice import choose, kernels_of
from aotexport_runtime.engines.cuda.launch import Driver
from tests.gpu.models import SMALL, make

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    # Of torch, of any release.
    pytest.mark.filterwarnings("default"),
]

DEVICE = "cuda"
STEPS = 8
OPTIONS = {
    "tuned": CudaRuntime(remember=False),
    "first candidates": CudaRuntime(tune=False, verify="never"),
    "graphs": CudaRuntime(tune=False, cuda_graphs=True),
}


@pytest.fixture(scope="module")
def bundles(tmp_path_factory) -> Path:
    given = os.environ.get("AOTEXPORT_GPU_BUNDLES")
    if given:
        return Path(given)
    from tests.gpu.build import build

    directory = tmp_path_factory.mktemp("bundles")
    build(directory, SMALL)
    return directory


@pytest.fixture(autouse=True)
def exact_convolutions(monkeypatch):
    """Let cuDNN compute in float32, as eager on the CPU does."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


def loaded(path: Path, options: CudaRuntime):
    return load(path, device=DEVICE, target=TARGET, trust="native", cuda=options)


def on_device(name: str):
    model, args = make(name)
    return model.to(DEVICE), [arg.to(DEVICE) for arg in args]


def trained(model, args) -> list[float]:
    """Return the losses of some steps."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = model(*args)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("name", SMALL)
def test_recorded_calls_agree(bundles, name):
    assert selftest(bundles / name, device=DEVICE, target=TARGET, trust="native")


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("name", SMALL)
def test_training_equals_eager(bundles, name, options, caplog):
    caplog.set_level(logging.INFO, logger="aotexport_runtime")
    eager, args = on_device(name)
    module = loaded(bundles / name, OPTIONS[options]).train()
    torch.testing.assert_close(trained(module, args), trained(eager.train(), args), rtol=2e-3, atol=2e-3)
    for (parameter, ours), theirs in zip(module.named_parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-2, atol=2e-3, msg=parameter)
    assert "program train runs on" in caplog.text
    assert "without its kernels" not in caplog.text
    assert "no CUDA graph" not in caplog.text


@pytest.mark.parametrize("name", SMALL)
def test_inference_equals_eager(bundles, name):
    eager, args = on_device(name)
    module = loaded(bundles / name, OPTIONS["graphs"]).eval()
    eager.eval()
    with torch.no_grad():
        for _ in range(STEPS):
            torch.testing.assert_close(module(*args), eager(*args), rtol=1e-3, atol=1e-3)


def test_graphs_are_replayed(bundles, monkeypatch):
    replays = []
    replay = torch.cuda.CUDAGraph.replay
    monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", lambda self: (replays.append(1), replay(self))[1])
    _, args = on_device("perceptron")
    trained(loaded(bundles / "perceptron", OPTIONS["graphs"]).train(), args)
    # Each pass twice without, and the backward only once the forward has a graph.
    assert len(replays) == (STEPS - 2) + (STEPS - 4)


def test_text_is_compiled_by_the_driver(bundles, monkeypatch):
    monkeypatch.setattr(
        engine, "choose", lambda kernels, available, capability, limit: choose(kernels, ["ptx"], capability, limit)
    )
    monkeypatch.setattr(engine, "architectures_for", lambda available, capability: ["ptx"])
    eager, args = on_device("transformer")
    module = loaded(bundles / "transformer", OPTIONS["first candidates"]).train()
    torch.testing.assert_close(trained(module, args), trained(eager.train(), args), rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("name", SMALL)
def test_code_of_every_candidate_loads(bundles, name):
    bundle = open_bundle(bundles / name)
    properties = torch.cuda.get_device_properties(DEVICE)
    packs = {pack.architecture: unpacked(bundle, pack.architecture) for pack in bundle.kernels(TARGET).packs}
    driver = Driver.load(lambda binary: code_of(binary, packs[binary.architecture]))
    torch.empty(1, device=DEVICE)
    driver.enter(0)
    for program in bundle.program_names:
        kernels = kernels_of(bundle, program)
        capability = (properties.major, properties.minor)
        chosen = choose(kernels, packs, capability, properties.shared_memory_per_block_optin)
        assert chosen is not None
        for kernel in kernels:
            for _, binary in chosen[1][kernel.name]:
                assert driver.function(kernel.name, binary, 0)


def test_winners_are_remembered(bundles, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    _, args = on_device("transformer")
    loaded(bundles / "transformer", CudaRuntime())(*args)
    kept = sorted(tmp_path.rglob("*.json"))
    assert kept
    monkeypatch.setattr(tuning, "fastest", lambda *args: pytest.fail("timed again"))
    loaded(bundles / "transformer", CudaRuntime())(*args)
    assert sorted(tmp_path.rglob("*.json")) == kept


def test_threads_on_streams_of_their_own_get_their_own_results(bundles):
    eager, args = on_device("perceptron")
    module = loaded(bundles / "perceptron", OPTIONS["graphs"]).eval()
    eager.eval()

    def run(seed: int):
        stream = torch.cuda.Stream()
        generator = torch.Generator(DEVICE).manual_seed(seed)
        with torch.cuda.stream(stream), torch.no_grad():
            x = torch.randn(args[0].shape, generator=generator, device=DEVICE)
            results = [(module(x * step, args[1]), eager(x * step, args[1])) for step in range(STEPS)]
        stream.synchronize()
        return results

    with ThreadPoolExecutor(4) as pool:
        for results in pool.map(run, range(4)):
            for ours, theirs in results:
                torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_module_moves_to_another_device(bundles):
    eager, args = on_device("perceptron")
    module = loaded(bundles / "perceptron", OPTIONS["tuned"])
    module(*args)
    there = [arg.to("cuda:1") for arg in args]
    torch.testing.assert_close(module.to("cuda:1")(*there), eager.to("cuda:1")(*there), rtol=1e-3, atol=1e-3)
