"""Figures of the benchmarks: tables of what was and was not measured, limits, and systems that import nothing."""

import json
import subprocess
import sys
from dataclasses import replace

import pytest

from benchmarks import report
from benchmarks.artefacts import Artefacts
from benchmarks.cli import _parser
from benchmarks.figures import Figure, Spread
from benchmarks.models import MODELS
from benchmarks.processes import Fresh, NotMeasured, Settings
from benchmarks.suites import SUITES
from benchmarks.systems import SYSTEMS


def figure(system: str, samples: list[float], base: list[float]) -> Figure:
    value, baseline = Spread.of(samples), Spread.of(base)
    title = {"suite": "train", "model": "mlp", "measure": "train step", "system": system}
    return Figure(**title, value=value, cpu=value, relative=value.over(baseline))


def test_ratios_are_taken_round_by_round():
    # A round in which the machine is ten times as slow changes both alike.
    fast = figure("fast", [1.0, 10.0, 1.0], [2.0, 20.0, 2.0])
    assert fast.relative.samples == (0.5, 0.5, 0.5)


def test_table_says_why_a_figure_is_missing():
    missing = Figure(suite="train", model="mlp", measure="train step", system="peer", reason="it has no backward")
    table = report.text(SUITES["train"], [figure("eager", [2e-3], [2e-3]), missing])
    assert "not measured: it has no backward" in table
    assert "2 ms" in table


def test_every_listed_system_can_be_chosen():
    assert _parser().parse_args(["--systems", ",".join(SYSTEMS)]).systems == tuple(SYSTEMS)


def test_systems_import_no_torch_before_they_are_used():
    # What a system imports is part of what is measured of fresh processes.
    code = "import sys, benchmarks.systems, benchmarks.suites; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_means_are_over_the_models_that_were_measured():
    figures = [figure("fast", [1.0], [2.0]), replace(figure("fast", [1.0], [8.0]), model="gpt2")]
    missing = Figure(suite="train", model="vit", measure="train step", system="fast", reason="it has no backward")
    last = report.text(SUITES["train"], [*figures, missing]).splitlines()[-1]
    assert last.split() == ["mean", "of", "2", "train", "step", "fast", "0.25"]


def test_document_has_a_row_per_system_and_the_baseline_in_its_unit():
    figures = [figure("eager", [2e-3], [2e-3]), figure("fast", [1e-3], [2e-3])]
    rows = report.markdown({}, [], figures, []).splitlines()[-2:]
    assert rows == ["| eager | 2 ms |  |", "| fast | 0.50 |  |"]


def test_document_of_several_measures_has_medians_over_the_models():
    figures = [replace(figure("fast", [part], [2.0]), model=f"model{part}") for part in (1.0, 4.0, 3.0)]
    figures.append(Figure(suite="train", model="mlp", measure="memory", system="fast", reason="it has no backward"))
    assert report.markdown({}, [], figures, []).splitlines()[-2:] == ["| train step | 1.50 |", "| memory | - |"]


def test_document_of_a_stopped_run_names_what_is_missing():
    document = report.markdown({}, [], [figure("eager", [2e-3], [2e-3])], ["infer", "scale"])
    assert "not finished, or not begun: infer, scale." in document


def test_process_that_takes_too_long_is_ended_and_says_so():
    spec = {"what": "start", "action": None}
    with pytest.raises(NotMeasured, match=r"^no answer within 0 s$"):
        Fresh(spec, Settings(threads=1, limit_s=0.01)).sample()


def test_run_whose_time_is_spent_starts_no_process():
    with pytest.raises(NotMeasured, match=r"^the time of the run was spent$"):
        Fresh({"what": "start", "action": None}, Settings(threads=1, end_s=0.0)).sample()


def test_artefact_of_an_earlier_run_is_taken(tmp_path):
    (tmp_path / "mlp-weights.prepared.json").write_text(json.dumps({"wall_s": 1.0, "notes": ["it is small"]}))
    artefacts = Artefacts(tmp_path, Settings(threads=1, end_s=0.0), progress=lambda what: None)
    assert artefacts.of(SYSTEMS["eager"], MODELS["mlp"]) == tmp_path / "mlp-weights"
    assert artefacts.notes == ["it is small"]
