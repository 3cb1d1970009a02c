"""The process that a bundle is verified in has the runtime and the model's modules alone."""

import json
import os
import sys

import pytest
import torch

import aotexport
from aotexport import VerificationFailed
from aotexport.verify.bundles import run_selftest
from aotexport.verify.fresh import FreshProcess
from tests.cases.operators import NAMESPACE, operator_with_gradients
from tests.cases.subclasses import subclass_with_gradients, two

_SEEN = """
import json, sys
with open("seen", "w") as file:
    json.dump(sorted(sys.modules), file)
"""


def test_process_has_the_runtime_and_what_it_is_told_to_import(tiny, tmp_path, monkeypatch):
    (tmp_path / "seeing.py").write_text(_SEEN)
    monkeypatch.chdir(tmp_path)
    with FreshProcess() as started:
        monkeypatch.chdir("/")
        arguments = ["selftest", str(tiny), "--json", "--target", "portable", "--import", "seeing"]
        done = started.run(arguments, 600, [str(tmp_path), *sys.path])
    assert (done.returncode, done.stderr) == (0, "")
    assert all(result["agrees"] for result in json.loads(done.stdout))
    modules = set(json.loads((tmp_path / "seen").read_text()))
    assert {"torch", "aotexport_runtime"} <= modules
    assert not {"aotexport", "pytest", "torch._dynamo", "torch._inductor"} & modules


def test_process_that_fails_says_why(tmp_path):
    with pytest.raises(VerificationFailed) as caught:
        run_selftest(tmp_path, ["portable"])
    told = f"error: `{tmp_path}` is no bundle: it has no file `bundle.json` [bundle-missing]"
    assert str(caught.value) == f"the fresh process that verifies the bundle failed:\n{told}"


def _by_an_operator_and_a_subclass(x, pair, y):
    return operator_with_gradients(x), subclass_with_gradients(pair, y)


def test_modules_of_the_model_are_imported_from_where_the_exporter_has_them(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("aotexport_runtime.commands.self_test.run_vectors", None)  # Of this process.
    example = torch.ones(3, 4, requires_grad=True), two(3, 4, requires_grad=True), torch.ones(4, requires_grad=True)
    report = aotexport.export(
        _by_an_operator_and_a_subclass, example, output=tmp_path / "bundle", keep_operators=[NAMESPACE]
    )
    assert report.comparisons
    assert os.listdir(tmp_path) == ["bundle"]
