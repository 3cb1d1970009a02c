"""Lightning in two processes over a loaded bundle, beside the same run of the model."""

import subprocess
import sys

import pytest
import torch


def trained(bundle, directory, strategy):
    """Return losses and weights of a run."""
    directory.mkdir()
    command = [sys.executable, "-m", "tests.trainers.lightning_run", str(bundle), str(directory), strategy]
    finished = subprocess.run(command, capture_output=True, text=True)
    assert finished.returncode == 0, finished.stderr
    return torch.load(directory / "found.pt")


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_lightning_trains_a_bundle_in_two_processes_as_the_model(classifier, tmp_path, strategy):
    expected = trained("-", tmp_path / "model", strategy)
    found = trained(classifier, tmp_path / "bundle", strategy)

    assert len(expected["losses"]) == 8
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
