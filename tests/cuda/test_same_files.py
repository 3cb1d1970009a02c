"""Exports of one model with kernels: the same files, byte by byte, wherever they are made."""

import pytest
import torch

import aotexport
from aotexport_runtime import open_bundle


def scaled(x):
    return torch.tanh(x * 2).sum(1)


@pytest.mark.slow  # Kernels compiled twice are the same bytes in `test_compile.py`, too.
def test_same_model_gives_the_same_files(tmp_path):
    digests = []
    for name in ("one", "elsewhere"):
        path = tmp_path / name / "bundle"
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("XDG_CACHE_HOME", str(tmp_path / name / "cache"))
            torch.manual_seed(0)
            report = aotexport.export(scaled, (torch.randn(4, 8),), output=path, targets="cuda:sm_80", verify=False)
        assert report.notes == []
        digests.append({entry.path: entry.sha256 for entry in open_bundle(path).manifest.files})
    assert [name for name in digests[0] if name.startswith("targets/cuda/kernels/")] != []
    assert digests[0] == digests[1]
