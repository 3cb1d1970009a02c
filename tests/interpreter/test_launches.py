"""Models that launch kernels themselves: nothing verifies them at the export, so they are held to their own terms."""

import shutil

import pytest
import torch

import aotexport
from aotexport.lower.cuda import compile as compilation
from aotexport.verify.interpret import interpret
from aotexport_runtime import NotSupported, open_bundle
from tests.cases.triton_kernels import Computing, Launching
from tests.golden.refuse import edited_bundle
from tests.hostile.crafted import Crafted
from tests.interpreter.test_models import interpreted

BATCH = torch.export.Dim("batch", min=3, max=64)


def test_launches_give_what_operators_of_torch_give(tmp_path, monkeypatch):
    monkeypatch.setattr(compilation, "compile_kernels", lambda *args, **kwargs: compilation.Compiled({}, {}))
    for model in (Launching(), Computing()):
        output = tmp_path / type(model).__name__
        options = {"programs": "infer", "dynamic_shapes": ({0: BATCH},), "targets": ("cuda",), "verify": False}
        aotexport.export(model.eval(), (torch.randn(5, 4),), output=output, **options)
    bundle, recorded = Crafted(tmp_path / "Launching", tmp_path / "both"), tmp_path / "Computing"
    shutil.copytree(recorded / "testvectors", bundle.root / "testvectors", dirs_exist_ok=True)
    manifest = Crafted(recorded, tmp_path / "recorded").document("manifest")
    bundle.document("manifest")["testvectors"] = manifest["testvectors"]
    bundle.document("manifest")["files"] += [
        entry for entry in manifest["files"] if entry["path"].startswith("testvectors/")
    ]
    found = interpreted(bundle.seal(), 9)
    assert {result.vector for result in found.results} == {"example", "least-sizes", "other-sizes"}
    assert {launch.rpartition("_")[0] for launch in found.launches} >= {"scaling", "multiplying", "counting"}


def test_kernels_without_their_sources_are_not_interpreted(tmp_path):
    edit = {"file": "targets/cuda/kernels/kernels.json", "at": ["kernels", 0, "source"], "set": None}
    edited_bundle({"golden": "kernels", "edits": [edit]}, tmp_path / "bundle")
    with pytest.raises(NotSupported, match="the bundle has its kernels without their sources"):
        interpret(open_bundle(tmp_path / "bundle"))
