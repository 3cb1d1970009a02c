"""Files: missing, changed, not listed, outside of the bundle, or no bundle at all."""

import os
from pathlib import Path

import pytest

from aotexport_runtime import BundleInvalid, Limits, NotSupported, load, open_bundle
from tests.hostile.crafted import Crafted
from tests.refusals import refusal

GOLDEN = Path(__file__).parents[1] / "golden/v1.0"
TAMPERED = (
    "its SHA-256 differs from the manifest's: the file was changed or damaged after export. "
    "Copy the bundle again, or export it again"
)


def test_manifest_that_is_a_link_is_refused(crafted: Crafted):
    manifest = crafted.root / "bundle.json"
    manifest.rename(crafted.root.parent / "elsewhere.json")
    manifest.symlink_to(crafted.root.parent / "elsewhere.json")
    said = refusal(BundleInvalid, open_bundle, crafted.root)
    assert said == f"`{crafted.root}` is no bundle: it has no file `bundle.json`"


def test_listed_file_below_a_link_that_leads_outside_is_refused(crafted: Crafted):
    (crafted.root / "weights").rename(crafted.root.parent / "weights")
    (crafted.root / "weights").symlink_to(crafted.root.parent / "weights")
    assert crafted.refusal() == "weights/model.safetensors: leads outside the bundle"


def test_listed_pipe_is_refused_without_being_opened(crafted: Crafted):
    (crafted.root / "README.md").unlink()
    os.mkfifo(crafted.root / "README.md")
    assert crafted.refusal() == "README.md: missing"


@pytest.mark.parametrize("check_digests", [True, False])
def test_listed_file_of_another_size_is_refused(crafted: Crafted, check_digests):
    size = (crafted.root / "README.md").stat().st_size
    with (crafted.root / "README.md").open("ab") as stream:
        stream.write(b"x")
    said = refusal(BundleInvalid, open_bundle, crafted.root, check_digests=check_digests)
    assert said == f"README.md: expected {size} bytes, got {size + 1}"


def _flip(crafted: Crafted, path: str) -> None:
    data = bytearray((crafted.root / path).read_bytes())
    data[-2] ^= 1
    crafted.write(path, bytes(data))


@pytest.mark.parametrize("mapped", [None, True, False])
@pytest.mark.parametrize("path", ["README.md", "weights/model.safetensors"])
def test_listed_file_of_another_digest_is_refused_by_a_load_that_is_not_told_otherwise(crafted: Crafted, path, mapped):
    _flip(crafted, path)
    assert refusal(BundleInvalid, load, crafted.root, mapped=mapped) == f"{path}: {TAMPERED}"
    load(crafted.root, mapped=mapped, check_digests=False)


def test_graph_of_another_digest_is_refused_even_when_digests_are_not_checked_at_once(crafted: Crafted):
    _flip(crafted, "programs/train/joint.json")
    bundle = open_bundle(crafted.root, check_digests=False)
    assert refusal(BundleInvalid, bundle.graph, "train", "joint.json") == f"programs/train/joint.json: {TAMPERED}"


def test_json_file_that_is_listed_as_enormous_is_not_read(crafted: Crafted):
    path = crafted.root / "programs/train/joint.json"
    path.write_bytes(path.read_bytes() + b" " * (1 << 20))
    crafted.seal()
    bundle = open_bundle(crafted.root, limits=Limits(json_nbytes=1 << 20))
    said = refusal(BundleInvalid, bundle.graph, "train", "joint.json")
    assert said == "programs/train/joint.json: larger than the 1048576 bytes of JSON that are read"


@pytest.mark.parametrize("location", ["../outside", "linked"])
def test_onnx_model_that_reads_a_file_outside_is_refused(tmp_path, location):
    onnx = pytest.importorskip("onnx", reason="makes the model")
    pytest.importorskip("onnxruntime", reason="reads the model")
    crafted = Crafted(GOLDEN / "onnx_model/bundle", tmp_path / "crafted")
    (tmp_path / "outside").write_bytes(bytes(1000))
    (crafted.root / "linked").symlink_to(tmp_path / "outside")
    model = onnx.load(crafted.root / "model.onnx", load_external_data=False)
    [weight] = [tensor for tensor in model.graph.initializer if tensor.name == "weight"]
    weight.external_data[0].value = location
    (crafted.root / "model.onnx").write_bytes(model.SerializeToString())
    crafted.seal()
    with pytest.raises(NotSupported, match=r"ONNX Runtime [\d.]+ does not load `model.onnx`: .*External data path"):
        load(crafted.root, target="onnx")
