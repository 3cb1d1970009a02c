"""A slice of the fuzzing of gRPC, and its record."""

from __future__ import annotations

import json

from tests.fuzz import rpc
from tests.fuzz.bundles import SEED

CASES = 500


def test_mutated_messages_are_answered_or_refused_by_a_sentence(server):
    found = dict(rpc.outcomes(server, range(CASES)))
    assert {number: text for number, text in found.items() if text.startswith("!")} == {}
    assert sum(text == "OK" for text in found.values()) > CASES // 10


def test_record_of_messages_is_of_the_seed_and_counts_each():
    record = json.loads(rpc.RESULTS.read_text())
    assert (record["seed"], record["wrong"]) == (SEED, [])
    assert sum(record["messages"].values()) == record["next"] >= 20_000
