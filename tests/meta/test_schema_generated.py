"""What is generated from the records is current; of the JSON Schemas `tests/golden` has what they accept."""

import json
from pathlib import Path

import jsonschema
import pytest
from catalogue import own_docs, records

ROOT = Path(__file__).parents[2]
VALIDATORS = {
    name: jsonschema.Draft202012Validator(json.loads((ROOT / f"schemas/v1/{name}.schema.json").read_text()))
    for name in ("bundle", "program", "graph", "vector")
}


@pytest.mark.parametrize("record", records(), ids=lambda record: record.__name__)
def test_docstrings_of_a_record_tell_of_its_fields_in_their_order(record):
    told = list(own_docs(record))
    assert told == [field for field in record.__struct_fields__ if field in told]


@pytest.mark.parametrize("validator", VALIDATORS.values(), ids=VALIDATORS)
def test_json_schema_is_valid(validator):
    validator.check_schema(validator.schema)


DOCUMENTS = {
    "bundle": "bundle.json",
    "program": "programs/train/program.json",
    "graph": "programs/train/forward.json",
    "vector": "testvectors/train.example.json",
}


@pytest.mark.parametrize("kind", VALIDATORS)
def test_json_schemas_refuse_an_unknown_field(kind):
    document = json.loads((ROOT / "tests/golden/v1.0/linear/bundle" / DOCUMENTS[kind]).read_text())
    errors = list(VALIDATORS[kind].iter_errors({**document, "colour": "red"}))
    assert [error.message for error in errors] == ["Additional properties are not allowed ('colour' was unexpected)"]
