"""Lowering leaves torch as it was."""

import pytest
import torch
from triton.runtime import driver

from aotexport.torch_internals.inductor import (
    CudaInterface,
    _guard_registry,
    codegen_common,
    device_interfaces,
    inductor_config,
    triton_helpers,
    triton_heuristics,
)
from tests.cuda.lowered import lowered


def observed():
    """Return everything that lowering changes, as it is now."""
    return {
        "guards": [*_guard_registry()],
        "interfaces": dict(device_interfaces),
        "answers": {**vars(CudaInterface), **vars(CudaInterface.Worker)},
        "settings": inductor_config.save_config_portable(),
        "plugins": triton_heuristics.get_caching_autotuner_plugins,
        "driver": triton_helpers.set_driver_to_gpu,
        "triton": driver._active,
        "stream": hasattr(vars(torch)["_C"], "_cuda_getCurrentRawStream"),
        "wrapper": codegen_common.device_codegens["cuda"].fx_wrapper_codegen,
        **{name: getattr(torch.cuda, name) for name in ("get_device_properties", "device_count", "current_device")},
    }


def scaled(x):
    return (x * 2).relu().sum(1)


def test_lowering_undoes_every_change():
    lowered(scaled, torch.randn(4, 8))  # Registers backends, once.
    before = observed()
    lowered(scaled, torch.randn(4, 16))
    after = observed()
    assert {name for name in before if before[name] != after[name]} == set()


def test_lowering_that_fails_undoes_every_change(monkeypatch):
    lowered(scaled, torch.randn(4, 8))
    before = observed()
    monkeypatch.setattr("aotexport.lower.cuda.lowering.compile_for_gpu", lambda *args, **kwargs: 1 / 0)
    with pytest.raises(Exception, match="the compiler fails: division by zero"):
        lowered(scaled, torch.randn(4, 8))
    assert observed() == before


def test_check_by_nvml_calls_no_driver(monkeypatch):
    # Of builds with CUDA; Lightning sets it when it is imported.
    monkeypatch.setenv("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    assert lowered(scaled, torch.randn(4, 8)).kernels
