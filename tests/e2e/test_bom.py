"""Bills of materials: valid by the official schema of CycloneDX, and of what the bundle has."""

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from aotexport.cli import app
from tests.hostile.crafted import Crafted

pytest.importorskip("cyclonedx", reason="needs the extra `bom`")
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator

GOLDEN = Path(__file__).parents[1] / "golden" / "v1.0"
PARENTS = [
    {"name": "Tuned", "sha256": "1" * 64, "changes": ["`weight` changed"]},
    {"name": "Base", "sha256": "2" * 64, "path": "encoder", "child": 0},
]


def bom(bundle: Path) -> dict[str, Any]:
    """Return the document that the command prints, once the official schema takes it."""
    done = CliRunner().invoke(app, ["bom", str(bundle)], catch_exceptions=False)
    assert (done.exit_code, done.stderr) == (0, "")
    assert JsonStrictValidator(SchemaVersion.V1_6).validate_str(done.stdout) is None
    return json.loads(done.stdout)


def properties(component: dict[str, Any], name: str) -> list[str]:
    return [entry["value"] for entry in component.get("properties", ()) if entry["name"] == f"aotexport:{name}"]


@pytest.mark.parametrize("case", ["kernels", "tensor_subclasses", "onnx_model", "compiled_for_no_target", "notes"])
def test_bill_of_materials_lists_every_file_and_the_operators_of_every_graph(case: str) -> None:
    bundle = GOLDEN / case / "bundle"
    manifest = json.loads((bundle / "bundle.json").read_text())
    document = bom(bundle)
    files = {each["name"]: each["hashes"] for each in document["components"] if each["type"] == "file"}
    assert files == {each["path"]: [{"alg": "SHA-256", "content": each["sha256"]}] for each in manifest["files"]}
    operators = set[str]()
    for graph in bundle.rglob("*.json"):
        operators |= {node["op"] for node in json.loads(graph.read_text()).get("nodes", ())}
    found = properties(document["metadata"]["component"], "operator")
    assert operators <= {line.rpartition(": ")[0] for line in found}
    root = next(each for each in document["dependencies"] if each["ref"] == "bundle")
    assert set(root["dependsOn"]) == {each["bom-ref"] for each in document["components"]}


def test_parents_of_a_bundle_are_its_pedigree(tiny: Path, tmp_path: Path) -> None:
    crafted = Crafted(tiny, tmp_path / "crafted")
    crafted.put("manifest", "ancestors", PARENTS)
    crafted.seal()
    component = bom(crafted.root)["metadata"]["component"]
    tuned, base = sorted(component["pedigree"]["ancestors"], key=lambda parent: parent["bom-ref"])
    assert [each["hashes"][0]["content"] for each in (tuned, base)] == ["1" * 64, "2" * 64]
    assert properties(tuned, "change") == ["`weight` changed"]
    assert (properties(base, "path"), properties(base, "child")) == (["encoder"], [tuned["bom-ref"]])
