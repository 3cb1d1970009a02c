"""Exported models, forward and backward on their kernels, equal what eager recorded."""

import importlib.util
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

import aotexport
from aotexport.cli import app
from aotexport.lower.cuda import compile as compilation
from aotexport.verify.interpret import Interpreted, interpret
from aotexport_runtime.bundle.read import open_bundle
from aotexport_runtime.commands.results import describe_failures
from tests.interpreter.models import QUICK, SLOW

EVERY = [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)]


def interpreted(bundle: Path, candidate: int = 0) -> Interpreted:
    """Return what the kernels of a bundle give, every result compared."""
    found = interpret(open_bundle(bundle), candidate)
    assert [line for result in found.results for line in describe_failures(result)] == []
    return found


def exported(name: str, directory: Path, monkeypatch: pytest.MonkeyPatch) -> aotexport.ExportReport:
    # What is interpreted are the sources; compiled code has tests of its own.
    monkeypatch.setattr(compilation, "compile_kernels", lambda *args, **kwargs: compilation.Compiled({}, {}))
    torch.manual_seed(0)
    model, args, options = {**QUICK, **SLOW}[name]()
    return aotexport.export(model, args, output=directory, programs="train", targets=("cuda",), verify=False, **options)


@pytest.mark.parametrize("name", EVERY)
def test_model_on_interpreted_kernels_equals_eager(name, tmp_path, monkeypatch):
    report = exported(name, tmp_path / "bundle", monkeypatch)
    assert not [note for note in report.notes if note.kind == "other"]
    found = interpreted(tmp_path / "bundle")
    assert ("train", "example") in {(result.program, result.vector) for result in found.results}
    kernels = {launch.partition("/")[0] for launch in found.launches}
    assert kernels == {kernel.name for program in report.programs for kernel in program.lowered.kernels}


@pytest.mark.slow
@pytest.mark.parametrize("candidate", [1, 2])
def test_other_candidates_equal_eager(candidate, tmp_path, monkeypatch):
    report = exported("mlp", tmp_path / "bundle", monkeypatch)
    kernels = [kernel for program in report.programs for kernel in program.lowered.kernels]
    expected = {f"{kernel.name}/{min(candidate, len(kernel.candidates) - 1)}" for kernel in kernels}
    assert set(interpreted(tmp_path / "bundle", candidate).launches) == expected


KERNELS = Path(__file__).parents[1] / "golden/v1.0/kernels/bundle"


def test_command_refuses_bundles_without_kernels(new_bundle):
    result = CliRunner().invoke(app, ["verify", str(new_bundle(torch.sin, torch.ones(2))), "--kernels"])
    assert (result.exit_code, "has no kernels" in result.stderr) == (1, True)


def test_command_names_triton_where_it_is_missing(monkeypatch):
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "triton" else found(name, *rest)
    )
    result = CliRunner().invoke(app, ["verify", str(KERNELS), "--kernels"])
    assert (result.exit_code, result.stderr.splitlines()[-1]) == (
        1,
        "error: kernels are interpreted by Triton: pip install 'aotexport[cuda]'",
    )


def test_programs_that_draw_are_named_instead_of_compared(new_bundle, monkeypatch):
    monkeypatch.setattr(compilation, "compile_kernels", lambda *args, **kwargs: compilation.Compiled({}, {}))
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(0.5))
    bundle = new_bundle(model, torch.ones(2, 4), targets=("cuda",))
    result = CliRunner().invoke(app, ["verify", str(bundle), "--kernels"])
    assert (result.exit_code, "random numbers" in result.stderr, "train" in result.stdout) == (0, True, False)
    assert "infer" in result.stdout
