"""Mistakes on the command line, each with the whole text that the user reads."""

from pathlib import Path

import pytest

from tests.mistakes.told import LINEAR, check

SYNTAX = (
    "write INPUT:AXIS=NAME[MIN:MAX], for example 'x:0=batch[1:64]' or 'batch[\"ids\"]:1=2*half'; for an integer "
    "INPUT=NAME[MIN:MAX], for example 'steps=count[1:100]'"
)

SUM = """import torch
def model(ids, types):
    return ids + types
example_inputs = (torch.ones(2, 5), torch.ones(2, 5))
"""

OPTIONS = {
    "dynamic_name_is_wrong": (
        "--dynamic x:0=batch",
        "--dynamic 'x:0=batch': there is no such tensor in the example call; its tensors are input",
    ),
    "dynamic_without_a_name": ("--dynamic input:0", f"--dynamic 'input:0': {SYNTAX}"),
    "dynamic_of_no_axis": (
        "--dynamic input=batch",
        "--dynamic 'input=batch': it is a tensor; say which of its axes, INPUT:AXIS=NAME",
    ),
    "target_is_unknown": ("--target gpu", "no target `gpu`; there are portable, cpu, cuda"),
    "target_is_an_option": (
        "--target onnx",
        "no target `onnx`; there are portable, cpu, cuda. ONNX models are an option of their own: --onnx (onnx=True)",
    ),
    "program_is_unknown": (
        "--program eval",
        "no program `eval`; there are train, infer, eval-joint, and `aotexport.Program`",
    ),
    "dtype_is_unknown": (
        "--dtype fp16",
        "Invalid value for '--dtype': 'fp16' is not one of 'float64', 'float32', 'bfloat16', 'float16'.",
    ),
    "opset_is_unknown": ("--onnx --opset 3", "no operator set 3; there are 18 to 23"),
}
"""Options of an export (exit code 2), and the whole message."""

REFUSED = {
    "bundle_as_model": ("bundle -o new", "`bundle` is a bundle; write `aotexport inspect bundle`"),
    "unknown_command": (
        "exprot new",
        "`exprot` is neither a model file nor a command; the commands are export, derive, verify, onnx, convert, inspect, check, diff, report, profile, view, selftest, finetune, serve, triton-config, push, pull, bom, sign, verify-signature, doctor, explain",
    ),
    "no_output": ("model.py", "Missing option '-o' / '--output'."),
    "output_exists": (
        "model.py -o bundle",
        "`bundle` exists; give force=True (--force) to replace it, or choose another place",
    ),
    "output_below_a_file": (
        "model.py -o weights.pt/new",
        "`weights.pt/new` would be below `{here}/weights.pt`, which is no directory; choose another place",
    ),
    "output_not_writable": (
        "model.py -o /proc/new",
        "`/proc/new` would be in `/proc`, where {closed}; choose another place",
    ),
    "import_is_unknown": (
        "verify bundle --against model.py --import nothing",
        "importing `nothing` failed: No module named 'nothing'",
    ),
}
"""Command lines (exit code 2), and the whole message."""

FAILING = {
    "dynamic_and_needed": (
        "model.py -o new --dynamic input:1=width",
        "`input`: axis 1 was declared dynamic as `width`, and the model works only for size 4. Give another example size, "
        "change the model, or leave this axis static",
    ),
    "dynamic_and_tied": (
        "sum.py -o new --dynamic ids:0=batch",
        "{here}/sum.py:3: in model: `ids`: axis 0 was declared dynamic as `batch`, and the model works only for size 2. "
        "Give another example size, change the model, or leave this axis static; if it must equal axis 0 of `types`, "
        "which is fixed, declare that as `batch` too",
    ),
    "inspect_a_folder": ("inspect data", "`data` is no bundle: it has no file `bundle.json` [bundle-missing]"),
}
"""Command lines whose work fails (exit code 1)."""

ROWS = [
    *(pytest.param(f"model.py -o new {options}", 2, text, id=row) for row, (options, text) in OPTIONS.items()),
    *(pytest.param(command, 2, text, id=row) for row, (command, text) in REFUSED.items()),
    *(pytest.param(command, 1, text, id=row) for row, (command, text) in FAILING.items()),
]


@pytest.mark.parametrize(("command", "code", "text"), ROWS)
def test_mistake_on_the_command_line_is_told_in_whole(
    command: str, code: int, text: str, here: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (here / "model.py").write_text(LINEAR)
    (here / "sum.py").write_text(SUM)
    check(command, code, text, here, capfd)
