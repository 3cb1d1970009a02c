"""The process that a bundle is verified in, its own or a fork of one, has the runtime and the model's modules alone."""

import json
import os
import sys

import pytest
import torch

import aotexport
from aotexport.verify.fresh import FreshProcess
from tests.cases.operators import NAMESPACE, operator_with_gradients
from tests.cases.subclasses import subclass_with_gradients, two
from tests.forked import ForkedProcess

_SEEN = """
import json, os, sys
with open("seen", "a") as file:
    print(json.dumps([os.environ["SEEN_BY"], sorted(sys.modules)]), file=file)
"""


@pytest.mark.parametrize(("process", "turns"), [(FreshProcess, ["only"]), (ForkedProcess, ["first", "second"])])
def test_process_has_the_runtime_and_what_it_is_told_to_import(tiny, tmp_path, monkeypatch, process, turns):
    (tmp_path / "seeing.py").write_text(_SEEN)
    for turn in turns:
        monkeypatch.chdir(tmp_path)
        monkeypatch.setenv("SEEN_BY", turn)
        with process() as started:
            monkeypatch.chdir("/")
            arguments = ["selftest", str(tiny), "--json", "--target", "portable", "--import", "seeing"]
            done = started.run(arguments, 600, [str(tmp_path), *sys.path])
        assert (done.returncode, done.stderr) == (0, "")
        assert all(result["agrees"] for result in json.loads(done.stdout))
    seen = [json.loads(line) for line in (tmp_path / "seen").read_text().splitlines()]
    assert [turn for turn, _ in seen] == turns
    for _, modules in seen:
        # The last is what torch imports in a backward pass: it takes longer than the rest, and would in each fork.
        assert {"torch", "aotexport_runtime", "torch.fx.experimental.symbolic_shapes"} <= set(modules)
        assert not {"aotexport", "pytest", "torch._dynamo", "torch._inductor"} & set(modules)


def test_process_tells_why_it_failed(tmp_path):
    with FreshProcess() as started:
        done = started.run(["selftest", str(tmp_path / "absent")], 600)
    assert (done.returncode, done.stdout) == (2, "")
    assert "absent" in done.stderr


@pytest.mark.parametrize(
    ("function", "example", "options"),
    [
        (operator_with_gradients, (torch.ones(3, 4, requires_grad=True),), {"keep_operators": [NAMESPACE]}),
        (subclass_with_gradients, (two(3, 4, requires_grad=True), torch.ones(4, requires_grad=True)), {}),
    ],
    ids=["operator", "subclass"],
)
def test_modules_of_the_model_are_imported_from_where_the_exporter_has_them(
    tmp_path, monkeypatch, function, example, options
):
    monkeypatch.chdir(tmp_path)
    report = aotexport.export(function, example, output=tmp_path / "bundle", **options)
    assert report.comparisons
    assert os.listdir(tmp_path) == ["bundle"]
