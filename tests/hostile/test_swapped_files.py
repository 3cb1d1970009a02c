"""Files that are exchanged between the comparison of their digests and their use."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import aotexport_runtime
from aotexport_runtime.bundle.read import Bundle
from aotexport_runtime.bundle.weights import load_tensors
from tests.refusals import refusal

WEIGHTS = "weights/model.safetensors"


def form(subclass: object) -> None:
    raise AssertionError("no tensor subclass")


@pytest.fixture
def bundle(tiny: Path, tmp_path: Path) -> Bundle:
    shutil.copytree(tiny, tmp_path / "bundle")
    return aotexport_runtime.open_bundle(tmp_path / "bundle")


def tensors(bundle: Bundle, mapped: bool) -> dict[str, torch.Tensor]:
    return load_tensors(bundle, bundle.manifest.state, form, mapped=mapped)


@pytest.mark.parametrize("mapped", [True, False])
def test_weights_replaced_by_another_file_are_refused(bundle: Bundle, mapped: bool) -> None:
    other = bundle.root / "other"
    shutil.copy(bundle.root / WEIGHTS, other)
    os.replace(other, bundle.root / WEIGHTS)
    assert refusal(aotexport_runtime.BundleInvalid, tensors, bundle, mapped) == (
        f"{WEIGHTS}: its SHA-256 differs from the manifest's: the file was changed or damaged after export. Copy the "
        "bundle again, or export it again"
    )


@pytest.mark.parametrize("mapped", [True, False])
def test_loaded_weights_stay_when_the_directory_goes(bundle: Bundle, mapped: bool) -> None:
    loaded = tensors(bundle, mapped)
    expected = {name: tensor.clone() for name, tensor in loaded.items()}
    shutil.rmtree(bundle.root)
    assert all(torch.equal(loaded[name], tensor) for name, tensor in expected.items())


CHANGED = {
    "truncated": lambda path: os.truncate(path, 8),
    "overwritten": lambda path: path.write_bytes(b"\xff" * path.stat().st_size),
    "removed": lambda path: path.unlink(),
}


@pytest.mark.parametrize("change", CHANGED.values(), ids=CHANGED)
def test_weights_that_change_after_the_load_change_nothing(bundle: Bundle, change: Callable[[Path], object]) -> None:
    module = aotexport_runtime.load(bundle.root)
    expected = module(torch.ones(3, 4))["best"]
    for path in bundle.root.rglob("*.*"):
        change(path)
    assert torch.equal(module(torch.ones(3, 4))["best"], expected)
    assert not module.eval()(torch.ones(3, 4))["best"].isnan().any()
