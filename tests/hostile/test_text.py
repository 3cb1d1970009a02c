"""Text of a bundle: names that Python takes for one, and what a terminal would obey."""

import subprocess
import sys

import pytest
import torch

import aotexport_runtime
from aotexport_runtime import CheckFailed
from tests.hostile.crafted import Crafted

ESCAPE = "\x1b[2J\x1b]0;owned\x07"
SHOWN = r"\x1b[2J\x1b]0;owned\x07"
NOTHING = {"kind": "nothing"}


def text(value: str) -> dict[str, str]:
    return {"kind": "string", "value": value}


@pytest.mark.parametrize(
    ("op", "args", "error"),
    [
        ("aten::_assert_scalar.default", [0, text(ESCAPE)], RuntimeError),
        ("aten::_assert_scalar.default", ["no", text(ESCAPE)], CheckFailed),
        ("aten::_assert_async.msg", ["false", text(ESCAPE)], RuntimeError),
    ],
    ids=["scalar", "check", "tensor"],
)
def test_message_of_a_check_steers_no_terminal(crafted: Crafted, op, args, error) -> None:
    boolean = {"kind": "dtype", "value": "bool"}
    meta = {"kind": "tensor", "dtype": "bool", "shape": [], "stride": []}
    kwargs = {"dtype": boolean}
    crafted.node("forward", name="false", op="aten::zeros.default", args=[[]], kwargs=kwargs, meta=meta)
    crafted.node("forward", name="size", op="aten::sym_size.int", args=["linear", 0], meta={"kind": "size"})
    crafted.node("forward", name="no", op="python::eq", args=["size", 7], meta={"kind": "size"})
    crafted.node("forward", op=op, args=args, meta=NOTHING)
    module = aotexport_runtime.load(crafted.seal(), target="autograd")
    with pytest.raises(error) as caught:
        module(torch.ones(3, 4))
    assert SHOWN in str(caught.value)
    assert "\x1b" not in str(caught.value)


def test_error_of_the_command_line_steers_no_terminal(crafted: Crafted) -> None:
    crafted.put("forward", "nodes/0/args/0", ESCAPE)
    command = [sys.executable, "-m", "aotexport_runtime", "inspect", crafted.seal(), "--graph"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "is used before it is defined" in done.stderr
    assert "\x1b" not in done.stdout + done.stderr


def test_notes_of_a_bundle_steer_no_terminal(crafted: Crafted) -> None:
    sources = [{"file": ESCAPE, "line": 1, "function": ESCAPE}]
    crafted.put("forward", "sources", sources)
    for node in crafted.document("forward")["nodes"]:
        node.pop("source", None)
    command = [sys.executable, "-m", "aotexport_runtime", "inspect", crafted.seal(), "--graph"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "\x1b" not in done.stdout + done.stderr
