"""Bundles that the exporter does not write and every reader takes."""

import msgspec
import pytest
from click.testing import CliRunner

import aotexport_runtime
from aotexport.cli.app import app
from aotexport_runtime.bundle.check import faults_of
from aotexport_runtime.commands.results import describe_failures
from aotexport_runtime.commands.self_test import run_vectors
from aotexport_runtime.schema.codec import decode_record, encode_record
from aotexport_runtime.schema.manifest import Manifest
from tests.golden.refuse import TAKEN, edited_bundle


@pytest.mark.parametrize("target", ["portable", "autograd"])
@pytest.mark.parametrize("name", TAKEN)
def test_bundle_is_taken_and_does_what_eager_did(name, target, tmp_path):
    root = edited_bundle(TAKEN[name], tmp_path / name)
    assert faults_of(root) == []
    results = run_vectors(root, target=target)
    fails = TAKEN[name].get("fails", False)
    assert [result.error.startswith("CheckFailed: ") for result in results] == [fails] * len(results) != []
    assert fails or [line for result in results for line in describe_failures(result)] == []


def test_extension_is_kept_by_those_that_write_the_manifest_again(tmp_path):
    root = edited_bundle(TAKEN["extension_that_a_reader_skips"], tmp_path / "bundle")
    manifest = aotexport_runtime.open_bundle(root).manifest
    again = decode_record(encode_record(msgspec.structs.replace(manifest, training=True)), Manifest, where="x")
    assert again.extensions == {"x-acme-licence": {"name": "free", "years": [1, 2]}}


def test_inspect_shows_the_extensions(tmp_path):
    root = edited_bundle(TAKEN["extension_that_a_reader_skips"], tmp_path / "bundle")
    lines = [line.split() for line in CliRunner().invoke(app, ["inspect", str(root)]).output.splitlines()]
    assert ["extension:", "x-acme-licence"] in lines
