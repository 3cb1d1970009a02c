"""The range gate, and what a writer asks of its readers."""

import json

import pytest
from lock import LOCK, lock_of_records, read_lock

from aotexport.write.files import min_reader
from aotexport_runtime.errors import BundleInvalid, BundleTooNew
from aotexport_runtime.schema import versions
from aotexport_runtime.schema.codec import decode_record
from aotexport_runtime.schema.manifest import Manifest
from aotexport_runtime.schema.versions import Envelope, check_readable, parse_version
from tests.refusals import refusal


def manifest(**changes):
    """Return the JSON of a manifest that is valid in format 1.0, with some fields changed."""
    document = {
        "format": "1.0",
        "min_reader": "1.0",
        "calling_convention": 1,
        "producer": {"aotexport": "0.1.0", "torch": "2.13.0"},
        "name": "Net",
        "kind": "module",
        "programs": [{"name": "infer"}],
        "files": [],
    }
    return json.dumps({**document, **changes}).encode()


@pytest.mark.parametrize(
    ("written", "needed", "oldest", "supported"),
    [
        ("1.0", "1.0", (1, 0), (1, 0)),
        ("1.0", "1.0", (1, 0), (1, 3)),
        ("1.2", "1.1", (1, 0), (2, 0)),
        ("1.4", "1.0", (1, 0), (1, 0)),
        ("1.10", "1.9", (1, 0), (1, 9)),
    ],
    ids=["same", "older_minor", "older_major", "newer_minor", "two_digits"],
)
def test_gate_in_range_accepts_the_bundle(written, needed, oldest, supported):
    envelope = Envelope(format=written, min_reader=needed)
    assert check_readable(envelope, oldest=oldest, supported=supported) is None


@pytest.mark.parametrize(
    ("written", "needed", "supported"), [("1.1", "1.1", (1, 0)), ("2.0", "2.0", (1, 9)), ("1.10", "1.10", (1, 9))]
)
def test_gate_above_range_refuses_the_bundle_with_both_versions_and_remedies(written, needed, supported):
    reads = versions.format_version(supported)
    with pytest.raises(BundleTooNew) as caught:
        check_readable(Envelope(format=written, min_reader=needed), supported=supported)
    assert (caught.value.needed, caught.value.supported) == (parse_version(needed), supported)
    assert str(caught.value) == (
        f"bundle.json: this bundle has format {written} and needs a reader of format {needed} or newer; this runtime "
        f"reads up to {reads}. Install a newer aotexport-runtime, or export the model again with an aotexport that "
        f"writes format {reads}"
    )


@pytest.mark.parametrize(("written", "needed"), [("1.2", "0.9"), ("1.2", "1.3"), ("2.0", "1.9")])
def test_gate_refuses_versions_that_contradict_each_other(written, needed):
    said = refusal(BundleInvalid, check_readable, Envelope(format=written, min_reader=needed), supported=(2, 5))
    assert said == f"bundle.json: `min_reader` is {needed}; expected {written[0]}.0 to {written}, the bundle's format"


def test_gate_below_range_refuses_the_bundle_with_both_versions_and_remedies():
    with pytest.raises(BundleInvalid) as caught:
        check_readable(Envelope(format="1.7", min_reader="1.0"), oldest=(2, 0), supported=(3, 1))
    assert str(caught.value) == (
        "bundle.json: this bundle has format 1.7; this runtime reads 2.0 to 3.1. Load it with an older "
        "aotexport-runtime, or export the model again"
    )


@pytest.mark.parametrize(
    "text",
    ["", "1", "1.", ".0", "1.0.0", "1.x", "-1.0", "01.0", "1.00", "\u0661.\u0660", "1.0\n", "1" * 5000 + ".0"],
    ids=repr,
)
def test_version_that_is_none_is_refused(text):
    said = refusal(BundleInvalid, parse_version, text)
    assert said == f"bundle.json: expected a version `MAJOR.MINOR`, got {text[:20]!r}"


@pytest.mark.parametrize(
    ("field", "value"), [("extensions", {"x-a": 1}), ("must_understand", ["x-a"]), ("operator_set", "aotexport.aten/2")]
)
def test_min_reader_of_a_newer_field_is_the_format_that_brought_it(field, value):
    assert min_reader([decode_record(manifest(**{field: value}), Manifest, where="x")]) == (1, 1)


def test_features_are_the_newer_fields_of_the_lock():
    entries = [entry for entry in lock_of_records(read_lock(LOCK))["entries"] if entry["since"] != "1.0"]
    records = {entry["name"] for entry in entries if entry["kind"] == "record"}
    fields = {e["name"]: parse_version(e["since"]) for e in entries if e["kind"] == "field"}
    assert {n: v for n, v in fields.items() if n.partition(".")[0] not in records} == versions.FEATURES
