"""Lowered programs compared with their portable form on the first call, on the CPU."""

import dataclasses

import pytest
import torch
from torch import nn

import aotexport
from aotexport_runtime import NotSupported
from aotexport_runtime.engines.cuda.trial import Trial, portable_form
from aotexport_runtime.engines.select import Choice
from aotexport_runtime.module import loading


def network():
    return nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2), nn.Tanh())


class Engine:
    """Gives the portable form as a lowered one, changed by a test, and compared."""

    def __init__(self, change):
        self.change, self.forwards = change, 0

    def __call__(self, bundle, program, environment):
        whole = portable_form(bundle, program, environment)
        changed = self.change(dataclasses.replace(whole, target="cuda"))

        def forward(args, symbols):
            self.forwards += 1
            return changed.forward(args, symbols)

        lowered = dataclasses.replace(changed, forward=forward)
        return dataclasses.replace(lowered, trial=Trial(bundle, program, environment, lowered))


def right(lowered):
    return lowered


def with_first_result(lowered, change):
    def forward(args, symbols):
        first, *others = lowered.forward(args, symbols)
        return (change(first), *others)

    return dataclasses.replace(lowered, forward=forward)


def wrong_output(lowered):
    return with_first_result(lowered, lambda value: value * 1.01)


def no_number(lowered):
    return with_first_result(lowered, lambda value: value.where(value > 0, torch.nan))


def wrong_shape(lowered):
    return with_first_result(lowered, lambda value: value[..., :1])


def wrong_gradient(lowered):
    def backward(args, symbols):
        *others, last = lowered.backward(args, symbols)
        first, *others = others
        return (first + 1, *others, last)

    return lowered if lowered.backward is None else dataclasses.replace(lowered, backward=backward)


def raising(error):
    def forward(args, symbols):
        raise error

    return lambda lowered: dataclasses.replace(lowered, forward=forward)


refused = raising(NotSupported("cuModuleLoadData failed: CUDA_ERROR_UNSUPPORTED_PTX_VERSION (222)"))
failing = raising(RuntimeError("cuDNN error: CUDNN_STATUS_NOT_SUPPORTED\nmore"))
too_large = raising(torch.cuda.OutOfMemoryError("CUDA out of memory"))


@pytest.fixture(scope="module")
def bundle(new_bundle):
    torch.manual_seed(0)
    model = network()
    return new_bundle(model, torch.randn(4, 3)), model


@pytest.fixture
def pair(bundle, monkeypatch, caplog):
    path, model = bundle
    caplog.set_level("INFO", logger="aotexport_runtime")

    def loaded(change):
        engine = Engine(change)
        monkeypatch.setattr(loading, "select_targets", lambda *args, **options: Choice(engines=("cuda",)))
        monkeypatch.setattr("aotexport_runtime.engines.cuda.engine.CudaEngine", lambda options: engine)
        eager = network()
        eager.load_state_dict(model.state_dict())
        return loading.load(path), eager, engine

    return loaded


def assert_trains_as_eager(module, eager):
    x = torch.randn(4, 3)
    for model in (module, eager):
        for _ in range(3):
            model(x).square().sum().backward()
    torch.testing.assert_close(module.get_parameter("0.weight").grad, eager[0].weight.grad)
    torch.testing.assert_close(module.get_buffer("1.running_mean"), eager[1].running_mean)


def test_program_that_agrees_serves_and_is_compared_once(pair, caplog):
    module, eager, engine = pair(right)
    assert_trains_as_eager(module, eager)
    assert engine.forwards == 3 + 1
    assert "kernels" not in caplog.text


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (wrong_output, "program train runs without its kernels, which disagree: result 0, 1.0e-02 off"),
        (no_number, "program train runs without its kernels, which disagree: result 0, inf off"),
        (wrong_gradient, "program train runs without its kernels, which disagree: gradient of input 0"),
        (wrong_shape, "disagree: result 0, expected torch.float32 of shape (2,), got torch.float32 of shape (1,)"),
        (refused, "program train runs without its kernels: cuModuleLoadData failed"),
        (failing, "program train runs without its kernels: cuDNN error: CUDNN_STATUS_NOT_SUPPORTED\n"),
    ],
)
def test_program_that_disagrees_runs_its_portable_form(pair, caplog, change, message):
    module, eager, engine = pair(change)
    assert_trains_as_eager(module, eager)
    assert engine.forwards == 1
    assert message in caplog.text
    assert caplog.text.count("runs without its kernels") == 1


def test_program_without_memory_to_compare_it_serves(pair, caplog):
    module, _, engine = pair(too_large)
    for _ in range(2):
        with pytest.raises(torch.cuda.OutOfMemoryError):
            module(torch.ones(4, 3))
    assert engine.forwards == 3
    assert "program train was not compared: there is not the memory for it" in caplog.text


def test_program_that_draws_random_numbers_is_not_compared(tmp_path, monkeypatch, caplog):
    caplog.set_level("INFO", logger="aotexport_runtime")
    aotexport.export(nn.Dropout(), (torch.ones(8),), output=tmp_path / "bundle", programs="train", verify=False)
    engine = Engine(right)
    monkeypatch.setattr(loading, "select_targets", lambda *args, **options: Choice(engines=("cuda",)))
    monkeypatch.setattr("aotexport_runtime.engines.cuda.engine.CudaEngine", lambda options: engine)
    loading.load(tmp_path / "bundle")(torch.ones(8))
    assert "program train draws random numbers, and its kernels are not compared" in caplog.text
