"""Text of a bundle: names that Python takes for one, and what a terminal would obey."""

import pytest
import torch

import aotexport_runtime
from aotexport_runtime import CheckFailed
from aotexport_runtime.cli.app import main
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


def test_error_of_the_command_line_steers_no_terminal(crafted: Crafted, capsys: pytest.CaptureFixture[str]) -> None:
    crafted.put("forward", "nodes/0/args/0", ESCAPE)
    assert main(["inspect", str(crafted.seal()), "--graph"]) == 1
    output, errors = capsys.readouterr()
    assert "is used before it is defined" in errors
    assert "\x1b" not in output + errors


def test_notes_of_a_bundle_steer_no_terminal(crafted: Crafted, capsys: pytest.CaptureFixture[str]) -> None:
    sources = [{"file": ESCAPE, "line": 1, "function": ESCAPE}]
    crafted.put("forward", "sources", sources)
    for node in crafted.document("forward")["nodes"]:
        node.pop("source", None)
    assert main(["inspect", str(crafted.seal()), "--graph"]) == 0
    assert "\x1b" not in "".join(capsys.readouterr())
