"""accelerate over a loaded bundle in two processes, beside the same run of the model."""

import subprocess
import sys

import pytest

from tests.trainers.accelerate_run import RANKS

COMPARED = ["after one", "predictions", "after two", "restored", "again", "losses"]


@pytest.mark.slow
def test_accelerate_trains_resumes_and_saves_in_two_processes_as_with_the_model(reader, tmp_path):
    command = [sys.executable, "-W", "error", "-m", "tests.trainers.accelerate_run", str(reader), str(tmp_path)]

    processes = [
        subprocess.Popen([*command, str(rank)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for rank in range(RANKS)
    ]

    for out, error in [process.communicate() for process in processes]:
        assert out.splitlines() == COMPARED, error
