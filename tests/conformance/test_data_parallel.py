"""`DistributedDataParallel` over loaded bundles: two processes train as one does on the joined batch."""

import subprocess
import sys

import pytest

from tests.data_parallel import RESULTS, VARIANTS, export

RANKS = 2


@pytest.mark.slow
def test_two_processes_train_a_bundle_as_one_process_trains_the_model_in_every_variant(tmp_path):
    export(tmp_path)
    command = [sys.executable, "-W", "error", "-m", "tests.data_parallel", str(tmp_path)]

    processes = [
        subprocess.Popen([*command, str(rank), str(RANKS)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for rank in range(RANKS)
    ]

    expected = [f"{result} {variant}" for result in RESULTS for variant in VARIANTS]
    for out, error in [process.communicate() for process in processes]:
        assert out.splitlines() == expected, error
