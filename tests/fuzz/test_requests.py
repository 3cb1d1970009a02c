"""A slice of the fuzzing of requests, and the record."""

import json

from tests.fuzz.bundles import SEED
from tests.fuzz.requests import RESULTS, case, outcome

CASES = 2000


def test_mutated_requests_are_read_or_refused_by_a_sentence() -> None:
    found = {number: outcome(*case(number)) for number in range(CASES)}
    assert {number: text for number, text in found.items() if text.startswith("!")} == {}
    assert sum(text == "read" for text in found.values()) > CASES // 10


def test_record_is_of_the_seed_and_counts_every_request() -> None:
    record = json.loads(RESULTS.read_text())
    assert (record["seed"], record["wrong"]) == (SEED, [])
    assert sum(record["requests"].values()) == record["next"] >= 1_000_000
