"""Mistakes in calls of `export`, `load` and `selftest`, each with its error and the whole text of it."""

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import aotexport
import aotexport_runtime
from aotexport import ExportFailed, ModelFileInvalid, Program
from aotexport_runtime import ArgumentInvalid, BundleInvalid, NotSupported
from tests.mistakes.told import check_raises, rows_of

LINEAR = nn.Linear(4, 2)
X = torch.ones(3, 4)
BATCH = torch.export.Dim("batch")


def named(name: str) -> nn.Module:
    """Return a module with a buffer of this name."""
    module = nn.Linear(4, 2)
    module.register_buffer(name, torch.ones(1))
    return module


def unstorable(name: str) -> str:
    return (
        f"the state name {name} cannot be stored: it is longer than 1000 characters, has characters that no screen "
        "shows, or is the one that safetensors keeps for itself. Rename it"
    )


def export(model: Any = LINEAR, args: Any = (X,), *more: Any, **options: Any) -> Callable[[], Any]:
    """Return a call of `export` that is yet to be made."""
    return lambda: aotexport.export(model, args, *more, **{"output": "new", **options})


def load(**options: Any) -> Callable[[], Any]:
    return lambda: aotexport_runtime.load("bundle", **options)


# what the user does, class of the error, its whole text
EXPORTS = {
    "tensor_for_arguments": (
        export(LINEAR, X),
        ModelFileInvalid,
        "example arguments must be a tuple, got Tensor; write `(x,)` for one",
    ),
    "nothing_for_model": (
        export(None),
        ModelFileInvalid,
        "what to export must be a module or a function of tensors, got NoneType",
    ),
    "name_with_a_wide_space": (export(named("a\xa0b")), ExportFailed, unstorable(r"'a\xa0b'")),
    "name_of_safetensors": (export(named("__metadata__")), ExportFailed, unstorable("'__metadata__'")),
    "too_many_arguments": (
        export(LINEAR, (X, X)),
        ModelFileInvalid,
        "the example inputs do not fit `Linear(input: torch.Tensor) -> torch.Tensor`: too many positional arguments",
    ),
    "method_is_missing": (
        export(programs=Program("encode", method="encode")),
        ModelFileInvalid,
        "`Linear` has no method `encode`",
    ),
    "mode_is_unknown": (
        export(programs=Program("test", mode="test")),
        ModelFileInvalid,
        "program `test`: no mode 'test'; there are train and eval",
    ),
    "dynamic_of_another_argument": (
        export(dynamic_shapes={"x": {0: BATCH}}),
        ModelFileInvalid,
        "dynamic_shapes names `x`; the parameters are input",
    ),
    "dynamic_dimension_is_another_size": (
        export(dynamic_shapes={"input": {0: 9}}),
        ModelFileInvalid,
        "dynamic_shapes: axis 0 of `input` is fixed to 9; it is 3 in the example inputs",
    ),
    "one_name_for_two_sizes": (
        export(nn.Bilinear(4, 4, 2), (X, X[:2]), dynamic_shapes=({0: BATCH}, {0: BATCH})),
        ModelFileInvalid,
        "dynamic_shapes: axis 0 of `input1` is 3 in the example inputs, so with the dimension `batch` axis 0 of `input2` "
        "must be 3; it is 2",
    ),
}

LOADS = {
    "nothing_there": (lambda: aotexport_runtime.load("nothing"), BundleInvalid, "no directory `nothing`"),
    "file": (
        lambda: aotexport_runtime.load("weights.pt"),
        BundleInvalid,
        "`weights.pt` is a file, and a bundle is a directory",
    ),
    "target_is_unknown": (
        load(target="gpu"),
        NotSupported,
        "no target `gpu`; there are auto, cpu, portable, autograd, cuda, onnx, openvino",
    ),
    "target_has_no_kernels": (
        load(target="cuda"),
        NotSupported,
        "the bundle has no kernels. Export it with `--target cuda`",
    ),
    "target_has_no_models": (
        load(target="onnx"),
        NotSupported,
        "the bundle has no ONNX models; add them with `aotexport onnx`, or load another target",
    ),
    "trust_is_true": (load(trust=True), NotSupported, "no trust tier `True`; there are data, native and Signed(...)"),
    "matmul_backend_is_unknown": (
        load(matmul="mkl"),
        NotSupported,
        "no `mkl` matmul backend; there are fastest, onednn, torch",
    ),
    "program_is_unknown": (
        lambda: aotexport_runtime.load("bundle").program("eval"),
        ArgumentInvalid,
        "no program 'eval'; the bundle has train, infer",
    ),
}

SELFTESTS = {
    "module": (
        lambda: aotexport_runtime.selftest(aotexport_runtime.load("bundle")),
        ArgumentInvalid,
        "`path`: expected a path, got Linear",
    ),
    "target_has_no_kernels": (
        lambda: aotexport_runtime.selftest("bundle", target="cuda", trust="native"),
        NotSupported,
        "the bundle has no kernels. Export it with `--target cuda`",
    ),
}


@pytest.mark.parametrize(("act", "kind", "text"), rows_of(export=EXPORTS, load=LOADS, selftest=SELFTESTS))
def test_mistake_in_a_call_is_told_in_whole(
    act: Callable[[], Any], kind: type[Exception], text: str, here: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    check_raises(act, kind, text, here, capfd)


def test_python_without_its_global_lock_is_refused(
    here: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "_is_gil_enabled", lambda: False, raising=False)
    text = (
        "this Python runs without its global interpreter lock, and nothing is tested without it: start it with "
        "`-X gil=1`, or set PYTHON_GIL=1"
    )
    check_raises(export(), ExportFailed, text, here, capfd)
    check_raises(load(), NotSupported, text, here, capfd)


@pytest.mark.skipif(torch.backends.cuda.is_built(), reason="the message is that of a torch without CUDA")
def test_missing_gpu_is_named(here: Path) -> None:
    with pytest.raises(NotSupported) as caught:
        aotexport_runtime.load("bundle", device="cuda")
    assert str(caught.value) == "no device `cuda` here: Torch not compiled with CUDA enabled"


def test_report_of_an_export_reads_as_what_the_command_prints(here: Path) -> None:
    report = aotexport.export(LINEAR, (X,), output="new")
    lines = re.sub(
        r"[\d.]+ s, [\d.]+ GB", "1.0 s, 1.0 GB", re.sub(r"[\d,]+ bytes", "9 bytes", str(report))
    ).splitlines()
    assert [line.rstrip() for line in lines if line] == [
        "new: Linear (module), 2 parameters (10 elements), 9 bytes in 16 files",
        "program  mode   targets   operators",
        "train    train  portable  1 forward, 8 joint",
        "infer    eval   portable  1 forward, 2 inference",
        "equal to eager in 18 comparisons",
        'sizes are fixed as in the example: input[3, 4]; `--dynamic "input:0=batch"` for others',
        "1.0 s, 1.0 GB of memory at most",
        "next: `aotexport inspect new`; in Python `aotexport_runtime.load('new')` is the module",
    ]
