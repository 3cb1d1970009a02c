"""Freezing, losses of some outputs, and modes, drawn at random: eager's results, or a refusal by name."""

import pytest

from tests.cases import all_cases
from tests.property.compared_calls import EXCLUDED, SESSIONS, Call, calls, export, model_of, summary

QUICK = (
    "three_programs",
    "frozen_part",
    "tied_weights",
    "several_outputs_of_several_inputs",
    "region_with_grad_inside_no_grad",
    "autocast_dropout",
    "buffer_replaced",
    "function_with_saved_intermediates",
)
SHARDS = 48


def run(name, tmp_path, sessions) -> list[Call]:
    model = model_of(name)
    export(model, tmp_path / name)
    return list(calls(model, tmp_path / name, sessions))


def checked(found: list[Call]) -> None:
    print(summary(found))
    assert len(found) >= 12
    assert [call for call in found if call.kind == "WRONG"] == []


@pytest.mark.parametrize("name", QUICK)
def test_drawn_call_of_a_case_gives_what_eager_gives(tmp_path, name):
    checked(run(name, tmp_path, 4))


@pytest.mark.slow
@pytest.mark.parametrize("name", [case.name for case in all_cases() if case.name not in EXCLUDED])
def test_any_drawn_call_of_a_case_gives_what_eager_gives(tmp_path, name):
    checked(run(name, tmp_path, SESSIONS))


@pytest.mark.slow
@pytest.mark.parametrize("shard", range(SHARDS))
def test_drawn_call_of_a_transformer_gives_what_eager_gives(tmp_path, shard):
    from tests.sweeps import zoo

    names = [name for name in sorted(zoo.MODELS) if name not in zoo.EXCLUDED][shard::SHARDS]
    checked([call for name in names for call in run(name, tmp_path, 4)])
