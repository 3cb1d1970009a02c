"""Runs of several ranks that end early, and go on."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.sharded_training.conftest import TIMEOUT_S
from tests.sharded_training.resumed import EVERY, STEPS


def curve(out: str) -> dict[int, float]:
    """Return the loss by step."""
    return {int(step): float(loss) for step, loss in (line.split() for line in out.splitlines())}


@pytest.fixture(scope="module")
def expected():
    """The losses of a run that nothing ends, filled by the first test."""
    return dict[int, float]()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("killed_at", "ranks"), [(25, 1), (25, 2), (25, 4), (3, 2), (14, 2), (56, 4)], ids=lambda number: f"{number}"
)
def test_run_that_a_killed_rank_ends_goes_on_on_any_number_of_ranks(
    run_ranks, start_ranks, tmp_path, expected, killed_at, ranks
):
    if not expected:
        expected.update(curve(run_ranks("resumed", 1, str(tmp_path / "whole"), "0")[0]))
    killed = start_ranks("resumed", 4, str(tmp_path / "run"), str(killed_at))
    outs = [process.communicate(timeout=TIMEOUT_S)[0] for process in killed]
    assert [process.returncode for process in killed][3] == -signal.SIGKILL
    assert [*curve(outs[3])] == [*range(killed_at)]
    found = curve(run_ranks("resumed", ranks, str(tmp_path / "run"), "0")[0])
    # A checkpoint that the run had begun to write in the background as it was killed may be whole or not.
    newest = (killed_at // EVERY) * EVERY
    begins = [newest, max(newest - EVERY, 0)] if killed_at == newest else [newest]
    assert [*found] in [[*range(begin, STEPS)] for begin in begins]
    assert found == pytest.approx({step: expected[step] for step in found}, abs=5e-6)


@pytest.mark.slow
def test_half_a_checkpoint_is_passed_over(run_ranks, tmp_path):
    expected = run_ranks("resumed", 2, str(tmp_path / "run"), "0")
    newest = tmp_path / "run" / "step-00000056"
    (newest / ".metadata").unlink()
    assert [*curve(run_ranks("resumed", 2, str(tmp_path / "run"), "0")[0])] == [*range(49, 60)]
    assert (newest / ".metadata").exists()
    assert [*curve(expected[0])] == [*range(60)]


@pytest.mark.slow
def test_ranks_with_different_bundles_and_a_checkpoint_of_another_bundle_are_refused_on_every_rank(run_ranks, tmp_path):
    messages = run_ranks("refusals", 2, "other_bundle", "no_bundle", "other_checkpoint")

    first = "ranks train one bundle together, and these loaded different ones (digests of `bundle.json`), or none. "
    first += "Give every rank the same bundle:"
    assert messages[0] == messages[1]
    lines = messages[0].splitlines()
    digests = [lines[index].partition("bundle ")[2] for index in (1, 2)]
    assert digests[0] != digests[1]
    assert lines == [
        first,
        f"  - rank 0: bundle {digests[0]}",
        f"  - rank 1: bundle {digests[1]}",
        first,
        f"  - rank 0: bundle {digests[0]}",
        f"  - rank 1: BundleInvalid: no directory `{tmp_path / 'nowhere'}`",
        f"`{tmp_path / 'checkpoints/step-00000001'}` is a checkpoint of another bundle: expected {digests[1]}, got "
        f"{digests[0]} (digests of `bundle.json`). Load the bundle that the run began with, or give the run another "
        "directory",
    ]


EXAMPLES = Path(__file__).parents[2] / "examples/finetune"


def torchrun(ranks: int, script: Path, *args: str) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    subprocess.run([*command, str(script), *args], check=True)


@pytest.mark.slow
def test_examples_on_several_ranks_have_the_losses_of_eager_and_go_on_as_they_would_have(tmp_path):
    subprocess.run(
        [sys.executable, "-m", "aotexport", str(EXAMPLES / "model.py"), "-o", str(tmp_path / "reader")], check=True
    )
    losses: dict[str, list[float]] = {}

    def run(name: str, script: str, *args: str) -> None:
        report = tmp_path / f"{name}.json"
        torchrun(2, EXAMPLES / script, *args, "--report", str(report))
        losses[name] = [float(loss) for loss in report.read_text().strip("[]").split(", ") if loss]

    bundles = (str(tmp_path / "reader"), str(tmp_path / "five"))
    for way in ("ddp", "fsdp"):
        run(way, f"deploy/{way}.py", *bundles)
        run(f"eager {way}", "eager_ranks.py", way)
        assert losses[way] == pytest.approx(losses[f"eager {way}"], abs=1e-6)
    run("begun", "deploy/resume.py", *bundles, str(tmp_path / "run"), "--stop-after", "2")
    run("resumed", "deploy/resume.py", *bundles, str(tmp_path / "run"))
    assert losses["begun"] + losses["resumed"] == pytest.approx(losses["fsdp"], abs=1e-6)
