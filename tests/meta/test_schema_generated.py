"""What is generated from the records is current, and the JSON Schemas accept what the exporter writes."""

import json
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest
import torch
from catalogue import own_docs, records
from torch import nn

import aotexport
from aotexport_runtime.bundle.read import open_bundle

ROOT = Path(__file__).parents[2]
VALIDATORS = {
    name: jsonschema.Draft202012Validator(json.loads((ROOT / f"schemas/v1/{name}.schema.json").read_text()))
    for name in ("bundle", "program", "graph", "vector")
}


@pytest.mark.slow  # `make lint` runs both.
@pytest.mark.parametrize("tool", ["generate.py", "diff.py"])
def test_tool_of_the_schema_finds_everything_current(tool):
    process = subprocess.run(
        [sys.executable, ROOT / "schemas/tools" / tool, "--check"], capture_output=True, text=True, check=False
    )

    assert (process.returncode, process.stdout, process.stderr) == (0, "", "")


@pytest.mark.parametrize("record", records(), ids=lambda record: record.__name__)
def test_docstrings_of_a_record_tell_of_its_fields_in_their_order(record):
    told = list(own_docs(record))
    assert told == [field for field in record.__struct_fields__ if field in told]


@pytest.mark.parametrize("validator", VALIDATORS.values(), ids=VALIDATORS)
def test_json_schema_is_valid(validator):
    validator.check_schema(validator.schema)


class Net(nn.Module):
    """A module with a mutated buffer, a dynamic size, aliased and nested outputs, and a constant argument."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x, *, scale=0.5):
        self.calls.add_(1)
        return {"out": self.linear(x).relu() * scale, "view": x.view(-1)}


@pytest.fixture(scope="module")
def documents(tmp_path_factory):
    """Return every JSON file of an exported bundle, by kind."""
    path = tmp_path_factory.mktemp("schema") / "bundle"
    batch = torch.export.Dim("batch", min=2)
    aotexport.export(Net(), (torch.ones(4, 3),), output=path, dynamic_shapes={"x": {0: batch}}, verify=False)
    manifest = open_bundle(path).manifest
    vectors = {entry.record for entry in manifest.testvectors}
    found = [("bundle", path / "bundle.json")]
    for entry in manifest.files:
        if entry.path.endswith(".json"):
            kind = "vector" if entry.path in vectors else "program" if entry.path.endswith("program.json") else "graph"
            found.append((kind, path / entry.path))
    return [(kind, json.loads(file.read_text())) for kind, file in found]


def test_json_schemas_accept_every_file_of_an_exported_bundle(documents):
    assert {kind for kind, _ in documents} == set(VALIDATORS)
    assert [list(VALIDATORS[kind].iter_errors(document)) for kind, document in documents] == [[]] * len(documents)


@pytest.mark.parametrize("kind", VALIDATORS)
def test_json_schemas_refuse_an_unknown_field(documents, kind):
    document = next(document for other, document in documents if other == kind)

    errors = list(VALIDATORS[kind].iter_errors({**document, "colour": "red"}))

    assert [error.message for error in errors] == ["Additional properties are not allowed ('colour' was unexpected)"]
