"""Notes: what a bundle fixed, with the user's line, what a call outside gets, in report, bundle and inspect."""

import inspect
import json
import logging

import pytest
import torch

import aotexport
import aotexport_runtime
from aotexport_runtime.module.describe import describe, summary
from tests.e2e.processes import run_command

D = torch.export.Dim
TABLE = [torch.tensor(float(index)) for index in range(8)]


def by_index(x):
    return x * TABLE[int(x.argmax())]


def branching(x):
    return x * 2 if x.sum() > 0 else x


def counting(x, count):
    for _ in range(int(count)):
        x = x + 1
    return x


def shortened(x):
    return x[:5] + 1 if x.shape[0] > 4 else x


def repeated(x, times, flag=True):
    return x.repeat(times) if flag else x


def line_of(function, text):
    lines, first = inspect.getsourcelines(function)
    return first + next(index for index, line in enumerate(lines) if text in line)


VALUES = torch.tensor([1.0, 5.0, 2.0, 0.5])
BRANCH = "code of the model branches on values of tensors, and the program goes the example's way: "
NUMBER = "code of the model makes a Python number of a tensor, and the program is for the example's alone: "
ELSEWHERE = "elsewhere the model goes another way, or fails"


@pytest.mark.parametrize(
    ("function", "args", "sizes", "kind", "text", "fixed", "at"),
    [
        (by_index, (VALUES,), None, "number", f"{NUMBER}`value` is 1", "`value` is 1", "argmax"),
        (branching, (VALUES,), None, "branch", f"{BRANCH}a condition is True", "a condition is True", "sum"),
        (counting, (VALUES, torch.tensor(3)), None, "number", f"{NUMBER}`value` is 3", "`value` is 3", "range"),
        (
            shortened,
            (torch.randn(6),),
            ({0: D("rows", min=1, max=64)},),
            "size",
            f"`rows` is in [5:64], and [1:64] was declared: {ELSEWHERE}",
            "`rows` is in [5:64]",
            "shape",
        ),
        (
            lambda x: x[::2] + x[1::2],
            (torch.randn(6),),
            ({0: D("rows", min=2)},),
            "size",
            "the model holds sizes to `(((1 + rows) // 2) == (rows // 2))`",
            "`(((1 + rows) // 2) == (rows // 2))`",
            "::2",
        ),
        (repeated, (torch.randn(3), 2), None, "integer", "`times` is 2, as in the example", "`times` is 2", None),
    ],
    ids=["index", "truth", "count", "range", "relation", "integer"],
)
def test_what_an_export_fixes_is_a_note_with_the_users_line(function, args, sizes, kind, text, fixed, at, tmp_path):
    report = aotexport.export(function, args, dynamic_shapes=sizes, output=tmp_path / "bundle", verify=False)
    (note,) = report.notes
    assert (note.kind, note.programs, note.text, note.fixed) == (kind, ("infer",), text, fixed)
    if at is None:
        assert note.source is None
    else:
        assert note.source is not None
        assert (note.source.file, note.source.function) == ("tests/conformance/test_notes.py", function.__name__)
        assert note.source.line == line_of(function, at)
    (stored,) = aotexport_runtime.open_bundle(tmp_path / "bundle").program("infer").notes
    assert (stored.kind, stored.text, stored.fixed, stored.outside) == (kind, text, fixed, note.outside)
    assert stored.source == note.source


def test_values_that_are_only_computed_with_give_no_note(tmp_path):
    assert (
        aotexport.export(lambda x: x[x > 0].sum() * x.max(), (VALUES,), output=tmp_path / "bundle", verify=False).notes
        == []
    )


class Talking(torch.nn.Module):
    """Prints, logs and writes to a file; has dropout that stays in eval mode."""

    def __init__(self, file):
        super().__init__()
        self.file, self.drop = file, torch.nn.Sequential(torch.nn.Dropout()).eval()

    def forward(self, x):
        print("called")
        logging.getLogger("talking").warning("called")
        logging.getLogger("talking").debug("called")
        with self.file.open("a") as file, open(file=self.file):
            file.write("called\n")
        return self.drop(x) * 2


def test_output_of_the_model_and_submodules_in_eval_mode_are_notes(tmp_path):
    model = Talking(tmp_path / "log")
    report = aotexport.export(
        model,
        (VALUES,),
        output=tmp_path / "bundle",
        programs=["train"],
        progress=lambda stage: print(stage),
        verify=False,
    )
    calls = len(model.file.read_text().splitlines())
    first = line_of(Talking, "print")
    source = "tests/conformance/test_notes.py"
    found = [(note.source and (note.source.file, note.source.line), note.text) for note in report.notes]
    assert found == [
        (
            None,
            "program train: in eval mode, as the model has them: `drop`; their dropout and batch statistics do not "
            "train. Call `.train()` on the whole model in the model file to train all of it",
        ),
        *[
            (
                (source, first + line),
                f"the model {does}, and the bundle does not; this export ran the line {calls} times",
            )
            for line, does in ((0, "prints"), (1, "logs"), (3, "writes to a file"))
        ],
    ]


def test_backward_that_raises_in_eager_is_a_note(tmp_path):
    x = torch.ones(3, requires_grad=True)
    report = aotexport.export(lambda x: x.exp().add_(1), (x,), output=tmp_path / "bundle")
    assert [note.text for note in report.notes] == [
        "the backward pass of the model raises in every recorded call, in eager too: it cannot train"
    ]


def test_note_of_several_programs_is_one(tmp_path):
    model = torch.nn.Linear(4, 4)
    model.register_forward_hook(lambda module, args, output: branching(output))
    (note,) = aotexport.export(model, (torch.ones(2, 4),), output=tmp_path / "bundle", verify=False).notes
    assert note.programs == ("train", "infer")


def test_stripped_bundle_has_notes_without_lines(tmp_path):
    report = aotexport.export(by_index, (VALUES,), output=tmp_path / "bundle", strip=True, verify=False)
    assert [note.source for note in report.notes] == [None]
    assert b"test_notes" not in (tmp_path / "bundle/programs/infer/program.json").read_bytes()


def test_notes_are_in_both_inspections_and_in_the_report(tmp_path):
    report = aotexport.export(by_index, (VALUES,), output=tmp_path / "bundle", verify=False)
    bundle = aotexport_runtime.open_bundle(tmp_path / "bundle")
    where = f"tests/conformance/test_notes.py:{line_of(by_index, 'argmax')} in by_index"
    (note,) = report.notes
    shown = f"fixed (infer): {where}: {NUMBER}`value` is 1. A call with another raises CheckFailed"
    assert note.shown().startswith(shown)
    assert f"  {note.shown()}\n" in describe(bundle)
    assert f"\n{note.shown()}\n" in f"{report!r}\n"
    assert summary(bundle)["notes"] == [note.as_json()]
    shown = run_command("aotexport", "inspect", "--json", "bundle", cwd=tmp_path)
    assert json.loads(shown)["notes"] == [note.as_json()]
