"""State in parts over ranks: bundles train as one process trains the model on the joined batch."""

from __future__ import annotations

import pytest

from tests.sharded_training.ranks import WAYS


def test_two_ranks_that_share_the_state_train_a_bundle_as_one_process_trains_the_model(run_ranks):
    ways = ["whole", "blocks"]

    assert [out.splitlines() for out in run_ranks("ranks", 2, *ways)] == [ways] * 2


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_every_way_to_share_the_state_trains_a_bundle_as_one_process_trains_the_model(run_ranks, ranks):
    assert [out.splitlines() for out in run_ranks("ranks", ranks, *WAYS)] == [[*WAYS]] * ranks


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "part"), [(2, 0.6), (4, 0.35)])
def test_each_rank_holds_its_part_of_weights_gradients_and_optimizer_state(run_ranks, ranks, part):
    for whole, own in (map(int, out.split()) for out in run_ranks("memory", ranks)):
        assert own <= part * whole


@pytest.mark.slow
def test_calls_that_would_read_a_part_for_the_whole_are_refused_by_name(run_ranks):
    assert run_ranks("refusals", 1, "program_called", "rounded") == [
        "`table.weight` is in parts over processes here, and program `train` reads it whole: `fully_shard` gathers it "
        "for calls of the module that it was given. Give it the loaded module too, and call that (methods after "
        "`register_fsdp_forward_method`)\n"
        "`table` has a `weight` of another dtype, shape or class, and now returns what the rest of the program is not "
        "right for. Return what the original did, or change the model and export it again:\n"
        "  - `result`: expected float32[4, 5, 16], got bfloat16[4, 5, 16]\n"
    ]


@pytest.mark.slow
def test_save_of_parameters_in_parts_writes_the_bundle_of_the_whole(run_ranks, tmp_path):
    messages = run_ranks("saved", 2)

    files = [
        {file.relative_to(path): file.read_bytes() for file in path.rglob("*") if file.is_file()}
        for path in (tmp_path / "tuned", tmp_path / "expected")
    ]
    assert files[0] == files[1]
    refusal = f"`{tmp_path / 'tuned'}` exists; give force=True (--force) to replace it, or choose another place\n"
    assert messages == [refusal, f"rank 0 could not write the bundle: {refusal}"]
