"""A slice of the guided fuzzing of what reads bytes, its kept inputs, and the record."""

import itertools
import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fuzz.guided import RESULTS, corpus, outcome
from tests.fuzz.mutations import Mutator
from tests.fuzz.readers import READERS


@pytest.mark.parametrize("name", READERS)
def test_kept_inputs_and_mutations_are_read_or_refused(name: str) -> None:
    reader = READERS[name]
    seeds = [*reader.seeds()]
    assert {outcome(reader, data) for data in (*seeds, *corpus()[name])} <= {"read", "refused"}
    for number in range(4 * reader.share):
        mutator = Mutator(f"{name} {number}")
        assert outcome(reader, reader.changed(mutator, mutator.random.choice(seeds))) in ("read", "refused"), number


GUIDED = ("config", "manifest", "tree")
"""Readers that are fast to guide; `make fuzz` guides all."""


@pytest.mark.slow
def test_inputs_that_reach_new_code_are_read_or_refused() -> None:
    pytest.importorskip("atheris", reason="it has no wheel for this platform")
    command = [sys.executable, "-m", "tests.fuzz.guided", *GUIDED, "--seconds", "6"]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    counts = {name: json.loads(text) for name, text in itertools.pairwise(done.stdout.splitlines()) if name in GUIDED}
    assert counts.keys() == set(GUIDED)
    assert all(each["read"] and each["refused"] and not each["wrong"] for each in counts.values())


def test_record_is_of_every_reader_and_nothing_went_wrong() -> None:
    record = json.loads(RESULTS.read_text())
    assert record["readers"].keys() == READERS.keys()
    assert sum(each["read"] + each["refused"] for each in record["readers"].values()) >= 5_000_000
    assert not any(each["wrong"] for each in record["readers"].values())
