"""State in parts over ranks: bundles train as one process trains the model on the joined batch."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import aotexport_runtime
from aotexport_runtime import adapters
from tests.sharded_training.ranks import WAYS


def test_two_ranks_that_share_the_state_train_a_bundle_as_one_process_trains_the_model(run_ranks):
    ways = ["whole", "blocks"]
    assert [out.splitlines() for out in run_ranks("ranks", 2, *ways)] == [ways] * 2


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_every_way_to_share_the_state_trains_a_bundle_as_one_process_trains_the_model(run_ranks, ranks):
    assert [out.splitlines() for out in run_ranks("ranks", ranks, *WAYS)] == [[*WAYS]] * ranks


@pytest.mark.slow
def test_call_that_would_read_a_part_for_the_whole_is_refused_by_name(run_ranks):
    assert run_ranks("refusals", 1, "program_called") == [
        "`table.weight` is in parts over processes here, and program `train` reads it whole: `fully_shard` gathers it "
        "for calls of the module that it was given. Give it the loaded module too, and call that (methods after "
        "`register_fsdp_forward_method`)\n"
    ]


@pytest.mark.slow
def test_mistakes_are_one_error_on_every_rank(run_ranks, tmp_path):
    mistakes = ["adapter_of_another_base", "late_adapter", "rows_that_do_not_divide", "layers_that_do_not_divide"]
    expected = [
        f"{tmp_path / 'adapter of other'}: the adapter was trained over other weights than 'Network' has now: "
        "`norm.bias` differs. Load the bundle that it was trained over, or take it all the same (`any_base=True`)",
        "adapter `default` cannot be added: `unused` is in parts over processes, and new parameters would have a "
        "gradient of their own on each. Add adapters first, then give the module to `fully_shard`",
        "`rows`: 3 ranks do not divide 4 rows, and a mean over ranks would not be the mean over rows. Take 3 or 6 "
        "rows, or another number of ranks",
        "`blocks.0.feed.2.weight` [16, 64] is in parts over 3 processes along axis 1, and 3 does not divide 64: torch "
        "takes all parts for equal. Take a number of processes that divides 64",
    ]
    assert [out.splitlines() for out in run_ranks("refusals", 3, *mistakes)] == [expected] * 3


@pytest.mark.slow
def test_save_of_parameters_in_parts_writes_the_bundle_of_the_whole(run_ranks, tmp_path):
    messages = run_ranks("saved", 2)
    files = [
        {file.relative_to(path): file.read_bytes() for file in path.rglob("*") if file.is_file()}
        for path in (tmp_path / "tuned", tmp_path / "expected")
    ]
    assert files[0] == files[1]
    refusal = f"`{tmp_path / 'tuned'}` exists; give force=True (--force) to replace it, or choose another place\n"
    assert messages == [refusal, f"rank 0 could not write: {refusal}"]
    for name in ("adapter", "merged"):
        saved, wanted = (tensors_of(tmp_path / prefix) for prefix in (name, f"expected_{name}"))
        torch.testing.assert_close(saved, wanted, rtol=1e-6, atol=1e-6)
    module = aotexport_runtime.load(tmp_path / "network")
    adapters.load_adapter(module, tmp_path / "adapter")


def tensors_of(path: Path) -> dict[str, torch.Tensor]:
    """Return all tensors of an adapter's file, or of a bundle's weights."""
    files = [*path.glob("adapter_model.safetensors"), *path.glob("weights/*.safetensors")]
    return {key: tensor for file in files for key, tensor in load_file(file).items()}
