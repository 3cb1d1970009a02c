"""Calls that operators take, from the samples of torch's own tests: hostile calls begin at these."""

import json
from functools import cache
from pathlib import Path
from typing import Any

CALLS = Path(__file__).parent / "results" / "valid_calls.jsonl"


@cache
def valid_calls() -> dict[str, list[dict[str, Any]]]:
    """Return the calls of each operator, `base.overload`: its arguments by name, and its results as `results`."""
    lines = (json.loads(line) for line in CALLS.read_text().splitlines())
    return {line["operator"]: line["calls"] for line in lines}


def valid_calls_of(operator: str) -> list[dict[str, Any]]:
    """Return the calls of an operator, or else those of operators of its name: arguments are told by theirs."""
    base = operator.partition(".")[0].removesuffix("_")
    recorded = valid_calls()
    return recorded.get(operator) or [
        call for name, calls in recorded.items() if name.partition(".")[0].removesuffix("_") == base for call in calls
    ]
