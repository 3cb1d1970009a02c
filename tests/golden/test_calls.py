"""Golden calls: eager shows what they say, and the runtime does, by the graph that they name and by every target."""

import json

import pytest

import aotexport_runtime
from aotexport_runtime.errors import CallInvalid, NotSupported
from tests.golden.cases import TYPES
from tests.golden.observe import CALLS, Observer
from tests.golden.record_calls import Model, recorded
from tests.golden.refuse import bundle_of, edited_bundle

TARGETS = ("portable", "autograd")
GRAPHS = {"functional": "portable", "forward": "autograd"}


@pytest.mark.parametrize("name", CALLS)
def test_golden_call_of_the_runtime_shows_what_eager_showed_by_the_graph_that_it_names(name, tmp_path):
    case = CALLS[name]
    bundle = edited_bundle(case, tmp_path / "bundle") if "edits" in case else bundle_of(case["golden"])
    mode = json.loads((bundle / f"programs/{case['program']}/program.json").read_text(encoding="utf-8"))["mode"]
    for target in TARGETS:
        module = aotexport_runtime.load(bundle, target=target, tensor_types=TYPES)
        seen = Observer(case, bundle, Model(case["golden"], mode, module))
        if case["graph"] == "refused":
            assert isinstance(seen.error, CallInvalid | NotSupported), target
            continue
        assert (target, seen.differences(case)) == (target, [])
        runs = module.explain_program(case["program"]).has_run
        if target == "portable" and runs:
            assert runs[0].engine == GRAPHS[case["graph"]]


@pytest.mark.parametrize("name", CALLS)
def test_golden_call_of_eager_is_what_the_file_says(name, tmp_path):
    again = recorded(name, tmp_path)
    said = {key: value for key, value in CALLS[name].items() if key != "values"}
    assert {key: value for key, value in again.items() if key != "values"} == said
