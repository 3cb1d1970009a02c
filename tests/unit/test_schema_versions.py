"""The range gate, the upgrade chain, and what a writer asks of its readers."""

from __future__ import annotations

import json

import pytest
from lock import LOCK, lock_of_records, read_lock

from aotexport_runtime.bundle import read as bundle
from aotexport_runtime.errors import BundleInvalid, BundleTooNew
from aotexport_runtime.schema import decode_record, versions
from aotexport_runtime.schema.manifest import Manifest
from aotexport_runtime.schema.program import Rebind
from aotexport_runtime.schema.versions import Envelope, Upgrade, check_readable, min_reader, parse_version, pending


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

    assert check_readable(envelope, oldest=oldest, supported=supported) == parse_version(written)


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


def test_gate_refuses_a_newer_major_whatever_min_reader_says():
    with pytest.raises(BundleTooNew) as caught:
        check_readable(Envelope(format="2.1", min_reader="1.0"), supported=(1, 9))

    assert (caught.value.needed, caught.value.supported) == ((2, 0), (1, 9))


@pytest.mark.parametrize(("written", "needed"), [("1.2", "0.9"), ("1.2", "1.3"), ("2.0", "1.9")])
def test_gate_refuses_versions_that_contradict_each_other(written, needed):
    with pytest.raises(BundleInvalid) as caught:
        check_readable(Envelope(format=written, min_reader=needed), supported=(2, 5))

    assert str(caught.value) == (
        f"bundle.json: `min_reader` is {needed}; expected {written[0]}.0 to {written}, the bundle's format"
    )


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
    with pytest.raises(BundleInvalid) as caught:
        parse_version(text)

    assert str(caught.value) == f"bundle.json: expected a version `MAJOR.MINOR`, got {text[:20]!r}"


def test_manifest_of_a_newer_minor_that_permits_this_reader_is_read():
    assert bundle.read_manifest(manifest(format="1.7")).format == "1.7"


def test_manifest_of_a_newer_minor_with_an_unknown_field_is_refused():
    with pytest.raises(BundleInvalid) as caught:
        bundle.read_manifest(manifest(format="1.7", colour="red"))

    assert str(caught.value) == "bundle.json: Object contains unknown field `colour`"


@pytest.mark.parametrize("convention", [0, 2])
def test_manifest_of_an_unknown_calling_convention_is_refused(convention):
    with pytest.raises(BundleInvalid) as caught:
        bundle.read_manifest(manifest(calling_convention=convention))

    assert str(caught.value) == (
        f"bundle.json: calling convention {convention} is not known to this runtime, which implements 1 to 1. Install "
        "the aotexport-runtime that fits, or export the model again"
    )


def test_min_reader_of_fields_at_their_defaults_is_the_first_format():
    assert min_reader([decode_record(manifest(operator_set="aotexport.aten/1"), Manifest, where="x")]) == (1, 0)


@pytest.mark.parametrize(
    ("field", "value"), [("extensions", {"x-a": 1}), ("must_understand", ["x-a"]), ("operator_set", "aotexport.aten/2")]
)
def test_min_reader_of_a_newer_field_is_the_format_that_brought_it(field, value):
    assert min_reader([decode_record(manifest(**{field: value}), Manifest, where="x")]) == (1, 1)


def test_min_reader_is_the_newest_format_among_the_fields_used(monkeypatch):
    used = {"ProgramEntry.targets": (1, 4), "Manifest.name": (1, 2), "ProgramEntry.variant_of": (2, 0)}
    monkeypatch.setattr(versions, "FEATURES", used)
    document = manifest(programs=[{"name": "infer"}, {"name": "train", "targets": ["portable", "cuda"]}])

    assert min_reader([decode_record(document, Manifest, where="x"), Rebind(name="x", output_index=0)]) == (1, 4)


def test_features_are_the_newer_fields_of_the_lock():
    entries = [entry for entry in lock_of_records(read_lock(LOCK))["entries"] if entry["since"] != "1.0"]
    records = {entry["name"] for entry in entries if entry["kind"] == "record"}
    fields = {e["name"]: parse_version(e["since"]) for e in entries if e["kind"] == "field"}

    assert {n: v for n, v in fields.items() if n.partition(".")[0] not in records} == versions.FEATURES


# --- the upgrade chain ------------------------------------------------------------------------------------


def rename(old, new):
    """Return a step that renames a field."""
    return lambda document: {new if key == old else key: value for key, value in document.items()}


CHAIN = (
    Upgrade(to=(2, 0), steps={"Rebind": rename("buffer", "tensor")}),
    Upgrade(to=(3, 0), steps={"Manifest": rename("title", "name")}),
    Upgrade(to=(4, 0), steps={"Rebind": rename("tensor", "name"), "Manifest": rename("sort", "kind")}),
)
"""A history of the format in which fields were renamed twice."""


@pytest.mark.parametrize(
    ("kind", "written", "steps"),
    [
        ("Rebind", (1, 0), 2),
        ("Rebind", (1, 9), 2),
        ("Rebind", (2, 0), 1),
        ("Rebind", (3, 5), 1),
        ("Rebind", (4, 0), 0),
        ("Rebind", (5, 0), 0),
        ("Manifest", (1, 0), 2),
        ("Graph", (1, 0), 0),
    ],
)
def test_pending_steps_are_those_newer_than_the_document(kind, written, steps):
    assert len(pending(kind, written, CHAIN)) == steps


def test_decode_of_an_old_document_applies_its_steps_in_order(monkeypatch):
    monkeypatch.setattr(versions, "UPGRADES", CHAIN)

    record = decode_record(b'{"buffer": "total", "output_index": 0}', Rebind, where="x", written=(1, 0))

    assert record == Rebind(name="total", output_index=0)


def test_decode_of_an_old_document_is_strict_after_the_upgrade(monkeypatch):
    monkeypatch.setattr(versions, "UPGRADES", CHAIN)

    with pytest.raises(BundleInvalid) as caught:
        decode_record(b'{"buffer": "total", "output_index": "0"}', Rebind, where="x.json", written=(1, 0))

    assert str(caught.value) == "x.json: Expected `int`, got `str` - at `$.output_index`"


def test_decode_of_a_current_document_takes_no_steps(monkeypatch):
    monkeypatch.setattr(versions, "UPGRADES", CHAIN)

    with pytest.raises(BundleInvalid) as caught:
        decode_record(b'{"buffer": "total", "output_index": 0}', Rebind, where="x.json", written=(4, 0))

    assert str(caught.value) == "x.json: Object contains unknown field `buffer`"


def test_manifest_of_an_older_format_is_upgraded_and_keeps_its_format(monkeypatch):
    monkeypatch.setattr(versions, "UPGRADES", CHAIN)
    document = json.loads(manifest())
    old = {{"name": "title", "kind": "sort"}.get(key, key): value for key, value in document.items()}

    read = bundle.read_manifest(json.dumps(old).encode())

    assert read == decode_record(manifest(), Manifest, where="bundle.json", written=(4, 0))
