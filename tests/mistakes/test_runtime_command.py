"""Mistakes on the runtime's command line, each with the whole text that the user reads."""

from importlib import metadata
from pathlib import Path

import pytest

from aotexport_runtime.cli.app import main
from tests.mistakes.told import told

# command line, exit code, whole message
ROWS = {
    "inspect_nothing": ("inspect nothing", 2, "Invalid value for 'BUNDLE': Directory 'nothing' does not exist."),
    "target_has_no_kernels": (
        "selftest bundle --target cuda --trust native",
        1,
        "the bundle has no kernels. Export it with `--target cuda`",
    ),
    "data_is_missing": (
        "finetune bundle --data nothing.jsonl -o tuned",
        2,
        "--data: there is no file or directory 'nothing.jsonl'; or write `digits`",
    ),
    "class_is_unknown": (
        "selftest bundle --tensor-type collections:Nothing",
        2,
        "`collections:Nothing` is no class; write MODULE:NAME, for example `mine.tensors:Int8Tensor`",
    ),
}


@pytest.mark.parametrize(("command", "code", "text"), ROWS.values(), ids=ROWS)
def test_mistake_on_the_command_line_of_the_runtime_is_told_in_whole(
    command: str, code: int, text: str, here: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(command.split()) == code
    printed = capfd.readouterr()
    assert (told(printed.err), printed.out) == (text, "")


def test_doctor_tells_what_the_machine_has_and_how_a_bundle_runs_on_it(
    here: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AOTEXPORT_MATMUL", "torch")
    assert main(["doctor", "bundle"]) == 0
    told = capfd.readouterr().out.splitlines()
    assert f"torch: {metadata.version('torch')}" in told
    assert "environment: AOTEXPORT_MATMUL=torch" in told
    assert any(line.startswith("bundle: Linear, format 1.") for line in told)
    assert "program infer on cpu: autograd (forward graph)" in told
