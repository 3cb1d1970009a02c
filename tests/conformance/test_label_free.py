"""Inference without labels, from bundles of models whose example holds labels; and sizes of further examples."""

import pytest
import torch
from torch import nn

import aotexport
import aotexport_runtime
from aotexport import Example, Program
from aotexport_runtime import CallInvalid
from tests.refusals import refusal

ROWS = torch.export.Dim("rows", min=1, max=64)


class Labelled(nn.Module):
    """Gives a loss and logits, by labels; `mask` is optional as well, and gives nothing of another structure."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(4, 3)

    def encode(self, features):
        return self.head(features)

    def forward(self, x, mask=None, labels=None, weights=None):
        logits = self.head(x if mask is None else x * mask)
        if labels is None:
            return {"logits": logits}
        loss = nn.functional.cross_entropy(logits, labels, weight=weights)
        return {"loss": loss, "logits": logits}


class LastOnly(Labelled):
    """Gives less without targets."""

    def forward(self, x, targets=None):
        if targets is None:
            return self.head(x[:, [-1]]), None
        logits = self.head(x)
        return logits, nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


class Positions(Labelled):
    """Needs both of two labels, or none."""

    def forward(self, x, start=None, end=None):
        logits = self.head(x)
        if start is None and end is None:
            return logits
        return logits, (logits[:, 0] - start).square().mean() + (logits[:, 1] - end).square().mean()


class Demanding(Labelled):
    """Fails without labels."""

    def forward(self, x, labels=None):
        return nn.functional.cross_entropy(self.head(x), labels)


def example(model):
    x, classes = torch.randn(5, 4), torch.randint(0, 3, (5,))
    if isinstance(model, LastOnly):
        return {"x": torch.randn(5, 6, 4), "targets": torch.randint(0, 3, (5, 6))}
    if isinstance(model, Positions):
        return {"x": x, "start": torch.randn(5), "end": torch.randn(5)}
    return {"x": x, "mask": torch.ones(5, 4), "labels": classes}


def exported(model, path, *, by_position=False, **options):
    torch.manual_seed(0)
    kwargs = example(model)
    sizes = {name: {0: ROWS} for name in kwargs}
    args = tuple(kwargs.values()) if by_position else ()
    kwargs = {} if by_position else kwargs
    return aotexport.export(model, args, kwargs, dynamic_shapes=sizes, output=path, **{"verify": False, **options})


@pytest.mark.parametrize(("make", "by_position"), [(Labelled, False), (LastOnly, True), (Positions, True)])
def test_inference_takes_calls_with_labels_and_without(make, by_position, tmp_path):
    model = make()
    report = exported(model, tmp_path / "bundle", by_position=by_position)
    assert [program.record.name for program in report.programs] == ["train", "infer", "infer.2"]
    loaded = aotexport_runtime.load(tmp_path / "bundle").eval()
    whole = {name: value[:3] for name, value in example(model).items()}
    labels = ("labels", "targets", "start", "end")
    free = {name: value for name, value in whole.items() if name not in labels}
    model.eval()
    for kwargs in (whole, free):
        torch.testing.assert_close(loaded(**kwargs), model(**kwargs), rtol=0, atol=0)
    if "mask" not in free:
        torch.testing.assert_close(loaded(*free.values()), model(*free.values()), rtol=0, atol=0)


def test_note_says_which_arguments_may_be_left_out(tmp_path):
    report = exported(Positions(), tmp_path / "bundle")
    (note,) = report.notes
    assert note.text == "calls of program `infer` may leave out `start` and `end`: `infer.2` serves them"


def test_label_free_variant_can_be_switched_off(tmp_path):
    report = exported(Labelled(), tmp_path / "bundle", label_free=False)
    assert [program.record.name for program in report.programs] == ["train", "infer"]
    assert report.notes == []
    with pytest.raises(CallInvalid, match="`labels`: missing; it was passed at capture"):
        aotexport_runtime.load(tmp_path / "bundle").eval()(torch.randn(5, 4), torch.ones(5, 4))


def test_variant_of_the_user_without_labels_stands_for_ours(tmp_path):
    free = {"x": torch.randn(5, 4), "mask": torch.ones(5, 4)}
    report = exported(Labelled(), tmp_path / "bundle", programs="infer", variants=[free])
    assert [program.record.name for program in report.programs] == ["infer", "infer.2"]
    assert report.notes == []


def test_model_that_fails_without_labels_needs_them_and_says_why(tmp_path):
    args = (torch.randn(5, 4), torch.randint(0, 3, (5,)))
    report = aotexport.export(Demanding(), args, programs="infer", output=tmp_path / "bundle", verify=False)
    (note,) = report.notes
    assert note.text.startswith("calls of program `infer` must pass `labels`: without, the model fails: ")
    assert "cross_entropy_loss(): argument 'target'" in note.text


def test_optional_tensor_without_which_results_are_alike_is_no_label(tmp_path):
    def scaled(x, by=None):
        return x if by is None else x * by

    report = aotexport.export(scaled, (torch.randn(3), torch.randn(3)), output=tmp_path / "bundle", verify=False)
    assert [program.record.name for program in report.programs] == ["infer"]


# --- sizes ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("further", [{"x": torch.randn(5, 4)}, Example((torch.randn(5, 4),))], ids=["dict", "Example"])
def test_example_without_sizes_takes_those_of_the_export_by_name(further, tmp_path):
    model = Labelled()
    exported(model, tmp_path / "bundle", programs=["train", Program("infer", example=further)])
    loaded, x = aotexport_runtime.load(tmp_path / "bundle").eval(), torch.randn(9, 4)
    assert torch.equal(loaded(x)["logits"], model.eval()(x)["logits"])


def test_example_with_empty_sizes_has_fixed_ones(tmp_path):
    program = Program("infer", example=Example((torch.randn(5, 4),), dynamic_shapes={}))
    exported(Labelled(), tmp_path / "bundle", programs=program)
    with pytest.raises(CallInvalid, match=r"`x`: expected shape \[5, 4\], got \[9, 4\]"):
        aotexport_runtime.load(tmp_path / "bundle").eval()(torch.randn(9, 4))


ASKS = (
    "An example without dynamic_shapes takes those of the export, by the names of its arguments; give it its own, "
    "`aotexport.Example(args, dynamic_shapes=...)`, `{}` for fixed sizes"
)


@pytest.mark.parametrize(
    ("program", "message"),
    [
        (
            Program("encode", method="encode", example=(torch.randn(5, 4),)),
            "program `encode`: dynamic_shapes of the export are for `x`, `mask`, `labels`, and this example passes "
            f"`features`. {ASKS}",
        ),
        (
            Program("infer", example=(torch.tensor(1.0),)),
            f"program `infer`: dynamic_shapes: `x` has 0 axes, no axis 0. {ASKS}",
        ),
    ],
    ids=["no name in common", "another rank"],
)
def test_example_that_cannot_take_the_sizes_of_the_export_is_asked_for_its_own(program, message, tmp_path):
    assert refusal(aotexport.ModelFileInvalid, exported, Labelled(), tmp_path / "bundle", programs=program) == message
