"""A slice of the fuzzing of bundles, the cases that once went wrong, and the record."""

import json
from pathlib import Path

import pytest

from tests.fuzz.bundles import RESULTS, SEED, Sources, cases, corpus, outcome

CASES = 160


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Sources:
    return Sources(tmp_path_factory.mktemp("fuzz"))


def test_mutated_bundles_are_loaded_or_refused(sources: Sources) -> None:
    rows = list(cases(sources, 0, CASES, run=True))
    assert len(rows) == CASES
    assert [(number, load, runs) for number, load, runs in rows if any(o.startswith("!") for o in (load, *runs))] == []
    assert sum(load == "ok" for _, load, _ in rows) > CASES // 10


def test_cases_that_once_went_wrong_no_longer_do(sources: Sources) -> None:
    for name, changed in corpus():
        root = sources.laid(name, changed)
        load, runs = outcome(root, run=True)
        sources.put_back(name, changed)
        assert not any(text.startswith("!") for text in (load, *runs)), (name, load, runs)


def test_record_is_of_the_seed_and_knows_what_went_wrong() -> None:
    record = json.loads(Path(RESULTS).read_text())
    assert record["seed"] == SEED
    assert sum(record["loads"].values()) == record["next"]
    assert record["loads"].get("wrong", 0) + record["runs"].get("wrong", 0) >= len(record["wrong"])
    assert len(record["wrong"]) == len(corpus())
