"""The zoo of semantics on interpreted kernels: mutations, aliases and layouts are what eager recorded."""

import pytest

import aotexport
from aotexport.lower.cuda import compile as compilation
from aotexport.verify.interpret import interpret
from aotexport_runtime.bundle.read import open_bundle
from aotexport_runtime.commands.results import describe_failures
from tests.cases import Case, all_cases

QUICK = "metadata_there_and_back"
"""The others' rules have tests of their own in `tests/cuda/test_lowering.py`."""
LAID_OUT_OTHERWISE = "normalised_channels_that_are_last"
"""GPUs lay the result of batch norm out as its input, in eager, too."""
NO_KERNELS = "ran nothing of program"
"""Calls that no lowered program serves run by another graph."""
EVERY = [
    pytest.param(case, id=case.name, marks=() if case.name == QUICK else pytest.mark.slow)
    for case in all_cases()
    if not case.forward_only and case.name != LAID_OUT_OTHERWISE
]


@pytest.mark.parametrize("case", EVERY)
@pytest.mark.filterwarnings("ignore")  # Of torch and of the cases, as in `tests/conformance/test_cases.py`.
def test_case_on_interpreted_kernels_equals_eager(case: Case, tmp_path, monkeypatch):
    monkeypatch.setattr(compilation, "compile_kernels", lambda *args, **kwargs: compilation.Compiled({}, {}))
    target, args, kwargs = case.make()
    options = {**case.options, "targets": ("cuda",), "verify": False}
    report = aotexport.export(target, args, kwargs, output=tmp_path / "bundle", **options)
    if not any(program.lowered for program in report.programs) and case.name != QUICK:
        pytest.skip("no program has kernels")
    found = interpret(open_bundle(tmp_path / "bundle"), 0)
    lines = [line for result in found.results for line in describe_failures(result)]
    assert [line for line in lines if NO_KERNELS not in line] == []
