"""Figures of the benchmarks: tables of what was and was not measured, limits, and systems that import nothing."""

import subprocess
import sys

import pytest

from benchmarks import report
from benchmarks.figures import Figure, Spread
from benchmarks.processes import Fresh, NotMeasured, Settings
from benchmarks.suites import SUITES


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


def test_systems_import_no_torch_before_they_are_used():
    # What a system imports is part of what is measured of fresh processes.
    code = "import sys, benchmarks.systems, benchmarks.suites; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_document_has_a_row_per_system_and_the_baseline_in_its_unit():
    figures = [figure("eager", [2e-3], [2e-3]), figure("fast", [1e-3], [2e-3])]
    rows = report.markdown({}, [], figures, []).splitlines()[-2:]
    assert rows == ["| eager | 2 ms |  |", "| fast | 0.50 |  |"]


def test_process_that_takes_too_long_is_ended_and_says_so():
    spec = {"what": "start", "action": None}
    with pytest.raises(NotMeasured, match=r"^no answer within 0 s$"):
        Fresh(spec, Settings(threads=1, limit_s=0.01)).sample()
