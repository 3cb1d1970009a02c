"""State in parts over ranks: bundles train as one process trains the model on the joined batch."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import aotexport_runtime
from aotexport_runtime import adapters
from tests.sharded_training.ranks import WAYS
from tests.sharded_training.saved_memory import export


def test_two_ranks_that_share_the_state_train_a_bundle_as_one_process_trains_the_model(run_ranks):
    ways = ["whole", "blocks"]

    assert [out.splitlines() for out in run_ranks("ranks", 2, *ways)] == [ways] * 2


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_every_way_to_share_the_state_trains_a_bundle_as_one_process_trains_the_model(run_ranks, ranks):
    assert [out.splitlines() for out in run_ranks("ranks", ranks, *WAYS)] == [[*WAYS]] * ranks


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
def test_mistakes_are_one_error_on_every_rank(run_ranks, tmp_path):
    mistakes = ["no_target", "adapter_of_another_base", "adapter_of_another_shape", "late_adapter"]
    expected = [
        "`targets`: 'mixer' means no weight of the module. Layers that it has: `blocks.2.mix`",
        f"{tmp_path / 'adapter of other'}: the adapter was trained on other weights than those of 'Network'. Load the "
        "bundle that it was trained on, or take it all the same (`any_base=True`)",
        f"{tmp_path / 'adapter of network'}: `blocks.0.mix.lora_A.weight` is [2, 32], and the module needs [2, 16]. "
        "Load the bundle of the model that it was trained on",
        "adapter `default` cannot be added: `table.weight` is in parts over processes, and new parameters would have a "
        "gradient of their own on each. Add adapters first, then give the module to `fully_shard`",
        "`rows`: 3 ranks do not divide 4 rows, and a mean over ranks would not be the mean over rows. Take 3 or 6 "
        "rows, or another number of ranks",
        "`blocks.0.feed.2.weight` [16, 64] is in parts over 3 processes along axis 1, and 3 does not divide 64: torch "
        "takes all parts for equal. Take a number of processes that divides 64",
    ]

    outs = run_ranks("refusals", 3, *mistakes, "rows_that_do_not_divide", "layers_that_do_not_divide")

    assert [out.splitlines() for out in outs] == [expected] * 3


SCRIPT = """
import sys
import torch.distributed as dist
from aotexport_runtime import adapters, ranks

dist.init_process_group("gloo")
module = ranks.load(sys.argv[1 + dist.get_rank()])
adapters.add_lora(module, sys.argv[3])
dist.barrier()
"""


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


@pytest.mark.slow
def test_save_of_parameters_in_parts_takes_no_more_memory_than_a_part(run_ranks, tmp_path, monkeypatch):
    export(tmp_path / "deep")
    # Freed memory goes back at once, and is not counted.
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", "65536")
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "65536")
    for whole, growth in (map(int, out.split()) for out in run_ranks("saved_memory", 2, str(tmp_path / "deep"))):
        assert growth < 0.5 * whole
