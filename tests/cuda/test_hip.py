"""Kernels for AMD GPUs: compiled and packed beside those for NVIDIA's, and refused by name where they would be run."""

from __future__ import annotations

import pytest
import torch

import aotexport
from aotexport.errors import ModelFileInvalid
from aotexport.lower.cuda import compile as compilation
from aotexport.lower.targets import check_targets
from aotexport_runtime import NotSupported, load, open_bundle
from aotexport_runtime.engines.cuda.choice import architectures_for


def scaled(x):
    return torch.tanh(x * 2).sum(1)


def export(path, cache):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(cache))
        torch.manual_seed(0)
        args = (torch.randn(4, 8),)
        report = aotexport.export(scaled, args, output=path, targets=("hip:gfx942", "cuda:sm_80"), verify=False)
    assert report.notes == []
    return path


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    path = tmp_path_factory.mktemp("hip")
    return export(path / "bundle", path / "cache")


def test_same_model_gives_the_same_files(bundle, tmp_path):
    again = export(tmp_path / "elsewhere", tmp_path / "cache")
    digests = [{entry.path: entry.sha256 for entry in open_bundle(path).manifest.files} for path in (bundle, again)]
    assert digests[0] == digests[1]


def test_bundle_has_code_objects_of_the_kernels_of_both_targets(bundle):
    opened = open_bundle(bundle)
    hip, cuda = opened.kernels("hip"), opened.kernels("cuda")
    assert [kernel.name for kernel in hip.kernels] == [kernel.name for kernel in cuda.kernels]
    codes = [binary for kernel in hip.kernels for candidate in kernel.candidates for binary in candidate.binaries]
    assert {binary.architecture for binary in codes} == {"gfx942"}
    assert [pack.architecture for pack in hip.packs] == ["gfx942"]


def test_target_is_refused_by_name_and_left_alone_by_others(bundle):
    with pytest.raises(NotSupported, match="target `hip` is experimental"):
        load(bundle, target="hip", trust="native")
    x = torch.randn(4, 8)
    torch.testing.assert_close(load(bundle, trust="native")(x), scaled(x))


def test_code_for_amd_is_never_chosen_for_a_device_of_nvidia():
    assert architectures_for(["gfx942", "sm_90", "ptx"], (9, 0)) == ["sm_90", "ptx"]


def test_unknown_architecture_is_refused():
    with pytest.raises(ModelFileInvalid, match="no architecture `gfx1`; there are gfx942"):
        check_targets(["hip:gfx1"])


def test_key_of_compiled_code_tells_architectures_apart():
    from tests.cuda.test_compile import DOUBLED

    keys = {compilation._description(DOUBLED, 0, name)["key"] for name in ("sm_80", "sm_90", "gfx942")}
    assert len(keys) == 3
