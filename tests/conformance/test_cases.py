"""Every case, through files, in a fresh process that has only the runtime, by both graphs, equal to eager."""

import json
import sys
import warnings

import pytest

import aotexport
import aotexport_runtime
from aotexport_runtime.values.subclasses import type_name
from tests.cases import Case, all_cases
from tests.cases.operators import NAMESPACE
from tests.cases.subclasses import TYPES
from tests.forked import ForkedProcess

CASES = [pytest.param(case, id=case.name, marks=[pytest.mark.slow] * case.slow) for case in all_cases()]


@pytest.fixture(scope="module")
def bundles(request, tmp_path_factory):
    """Export the cases that are tested without verification, and run all their self-tests in one fresh process."""
    root = tmp_path_factory.mktemp("bundles")
    failures = {}
    cases = [item.callspec.params["case"] for item in request.session.items if item.path == request.path]
    for case in cases:
        callable_, args, kwargs = case.make()
        try:
            # Operators with bodies make torch compile, which warns of its own deprecations.
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                aotexport.export(callable_, args, kwargs, output=root / case.name, **{"verify": False} | case.options)
        except aotexport.AotExportError as error:
            failures[case.name] = error
    paths = [str(root / case.name) for case in cases if case.name not in failures]
    types = [f"--tensor-type={type_name(type_)}" for type_ in TYPES]
    operators = ["--import", "tests.cases.operators", "--operator-namespace", NAMESPACE]
    arguments = ["selftest", "--json", *types, *operators, *paths, "--target", "autograd", "--target", "portable"]
    process = ForkedProcess().run(arguments, 900, sys.path)
    results = json.loads(process.stdout)
    return root, failures, results


def _failures(results, case: Case, target: str):
    return [
        (r["program"], r["vector"], r["error"], [d for d in r["differences"] if not d["agrees"]][:3])
        for r in results
        if r["bundle"].endswith(f"/{case.name}") and r["target"] == target and not r["agrees"]
    ]


@pytest.mark.parametrize("case", CASES)
def test_case_by_both_graphs_equals_eager(bundles, case):
    root, failures, results = bundles
    assert case.name not in failures, failures[case.name]
    bundle = aotexport_runtime.open_bundle(root / case.name)
    programs = [bundle.program(name) for name in bundle.program_names]
    if all(program.forward.differentiable for program in programs):
        assert _failures(results, case, "autograd") == []
    assert _failures(results, case, "portable") == []
    reasons = [refusal.reason for program in programs for refusal in program.refusals]
    assert bool(reasons) == bool(case.forward_only), reasons
    assert all(case.forward_only in reason for reason in reasons)
