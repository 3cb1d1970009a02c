"""`python -m aotexport_runtime check`: every fault of a bundle, with its code and JSON path."""

import json
from pathlib import Path

import pytest

import aotexport.errors  # noqa: F401 - whose classes are told too
from aotexport_runtime.bundle.check import faults_of
from aotexport_runtime.cli.app import main
from aotexport_runtime.commands.explain import explain
from aotexport_runtime.errors import ArgumentInvalid
from tests.hostile.crafted import Crafted

FORWARD = "programs/train/forward.json"


@pytest.fixture
def crafted(tiny, tmp_path):
    return Crafted(tiny, tmp_path / "crafted")


def found(crafted: Crafted) -> list[tuple[str, str, str]]:
    return [(fault.where, fault.path, fault.code) for fault in faults_of(crafted.seal())]


def test_faults_of_all_documents_are_found_in_order(crafted: Crafted):
    crafted.put("program", "guards", [{"op": "eq", "args": ["s9", 1]}, {"op": "mod", "args": [1, 0]}])
    crafted.put("forward", "nodes/0/args/0", "nothing")
    crafted.put("forward", "outputs/0", "nothing")
    crafted.put("joint", "nodes/0/meta", {"kind": "scalar", "type": "float"})
    assert found(crafted) == [
        ("programs/train/program.json", "$.guards[0]", "symbol-undefined"),
        ("programs/train/program.json", "$.guards[1]", "size-malformed"),
        (FORWARD, "$.nodes[0].args[0]", "value-undefined"),
        (FORWARD, "$.outputs[0]", "value-undefined"),
        ("programs/train/joint.json", "$.nodes[0].meta", "result-type"),
    ]


def test_places_that_are_not_of_a_records_type_are_all_found(crafted: Crafted):
    crafted.put("forward", "nodes/1/args", [{"kind": "dtype", "value": "float31"}, {"kind": "pickle"}])
    crafted.put("forward", "nodes/0/kwargs", {"a b": {"kind": "slice", "start": 1.5}})
    crafted.put("forward", "code", "import os")
    crafted.document("forward")["nodes"][2].pop("meta")
    assert found(crafted) == [
        (FORWARD, "$", "json-record"),
        (FORWARD, "$.nodes[0].kwargs['a b'].start", "json-record"),
        (FORWARD, "$.nodes[1].args[0].value", "json-record"),
        (FORWARD, "$.nodes[1].args[1]", "json-record"),
        (FORWARD, "$.nodes[2]", "json-record"),
    ]


def test_files_that_differ_are_all_found(crafted: Crafted):
    root = crafted.seal()
    (root / "programs/train/joint.json").write_text("{}")
    (root / "weights/model.safetensors").unlink()
    assert [(fault.where, fault.code) for fault in faults_of(root)] == [
        ("programs/train/joint.json", "file-differs"),
        ("weights/model.safetensors", "file-missing"),
    ]


def test_recorded_call_whose_tensors_are_no_safetensors_file_is_found(crafted: Crafted):
    crafted.write(crafted.document("manifest")["testvectors"][0]["tensors"], b"none")
    assert found(crafted) == [("bundle.json", "$.testvectors[0]", "tensor-stored")]


def test_check_prints_every_fault_and_says_by_its_exit_code_whether_there_are(crafted: Crafted, capsys):
    crafted.put("forward", "outputs/0", "nothing")
    root = str(crafted.seal())
    assert main(["check", root]) == 1
    assert capsys.readouterr().out == (
        f"{FORWARD} $.outputs[0]: value 'nothing' is used before it is defined [value-undefined]\n{root}: 1 fault\n"
    )
    assert main(["check", root, "--json"]) == 1
    reason = "value 'nothing' is used before it is defined"
    assert json.loads(capsys.readouterr().out) == [
        {"code": "value-undefined", "where": FORWARD, "path": "$.outputs[0]", "reason": reason}
    ]


def test_every_code_and_class_of_errors_is_explained_with_a_way_out(crafted: Crafted, capsys):
    checks = json.loads((Path(__file__).parents[2] / "schemas/v1/checks.json").read_text())["checks"]
    with pytest.raises(ArgumentInvalid) as raised:
        explain("nothing")
    known = str(raised.value).partition("there are ")[2].split(", ")
    assert {row["code"] for row in checks} | {"CallInvalid", "ExportFailed"} <= {*known}
    assert [name for name in known if "Way out: " not in explain(name)] == []
    crafted.put("forward", "outputs/0", "nothing")
    assert main(["inspect", str(crafted.seal())]) == 1
    code = capsys.readouterr().err.rpartition("[")[2].rstrip("]\n")
    assert main(["explain", code]) == 0
    assert capsys.readouterr().out.startswith("value-undefined: A value is used before it is defined.\n\nCause: ")
