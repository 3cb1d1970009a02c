"""Float32 is judged by eager's own error, and only where eager has one."""

import json

import pytest
import torch

import aotexport
import aotexport_runtime
from aotexport_runtime.values.compare import MOST, allowance, compare
from aotexport_runtime.values.observe import Observation
from tests.golden.cases import Cancelling

BATCH = torch.export.Dim("batch", min=1)


def example(rows=3):
    return torch.linspace(-1, 1, 4 * rows).reshape(rows, 4) / 3


def traced() -> bool:
    return torch.compiler.is_compiling()


class Off(Cancelling):
    """Loses digits in eager mode, and is wrong by a part in its trace."""

    def __init__(self, by, lost=16384.0):
        super().__init__()
        self.by, self.lost = by, lost

    def forward(self, x):
        return (x * (1 + self.by) if traced() else (x + self.lost) - self.lost) * self.weight


class Float32(Cancelling):
    """Asks for float32 by name, which a copy in float64 is not."""

    def forward(self, x):
        return super().forward(x) @ torch.ones(4, 2, dtype=torch.float32)


class Drawing(Cancelling):
    """Draws random numbers of the dtype of its argument, for which generators give others in float64."""

    def forward(self, x):
        return super().forward(x + torch.rand_like(x) * torch.empty_like(x).uniform_())


class Uncopied(Cancelling):
    """Refuses to be copied."""

    def __deepcopy__(self, memo):
        raise RuntimeError("no copies")


class Kink(Cancelling):
    """Has a ReLU whose operand is some roundings below 0, and in its trace above."""

    def forward(self, x):
        near = torch.ones_like(x[:, :1]) + (2.0**-22 if traced() else -(2.0**-22))
        return (torch.cat([x.exp() + 2, near], 1) * self.weight[-1] - 1).relu().sum()


def errors_of(bundle):
    files = sorted((bundle / "testvectors").glob("*.json"))
    return {file.stem: json.loads(file.read_text()).get("eager_errors", {}) for file in files}


def test_limit_is_twice_the_error_and_bounded():
    assert [allowance(error) for error in (0.0, 1e-5, 1e-3, 1.0)] == [0.0, 2e-5, 2e-3, MOST]


@pytest.mark.parametrize(
    ("own", "off", "agrees"),
    [
        (0.0, 5e-5, True),
        (0.0, 2e-4, False),
        (2e-4, 3e-4, True),
        (2e-4, 5e-4, False),
        (1.0, 9e-2, True),
        (1.0, 2e-1, False),
    ],
)
def test_own_error_raises_the_tolerance(own, off, agrees):
    expected, got = (Observation({}, {"output": torch.tensor([1.0, factor])}) for factor in (0.5, 0.5 + off))
    (difference,) = compare(expected, got, eager_errors={"output": own})
    assert difference.agrees is agrees


def test_bundle_may_be_as_far_from_eager_as_eager_is_from_the_truth(tmp_path):
    model = Cancelling()
    weight, before = model.weight, model.weight.detach().clone()
    report = aotexport.export(model, (example(),), output=tmp_path / "b")

    assert [program.record.refusals for program in report.programs] == [(), ()]
    assert {comparison.agrees for comparison in report.comparisons} == {True}
    assert max(comparison.error for comparison in report.comparisons) > 1e-3
    first, second = report.notes
    assert first.text.startswith("program train is judged by eager's own error: in the recorded call `example`, call ")
    assert second.text.startswith("program infer is judged by eager's own error: in the recorded call `example`, call ")
    assert model.weight is weight
    assert (weight.dtype, weight.grad) == (torch.float32, None)
    assert torch.equal(weight, before)
    found = errors_of(tmp_path / "b")
    assert found["infer.example"].keys() == {"call 0: output"}
    for target in ("portable", "autograd", "auto"):
        aotexport_runtime.selftest(tmp_path / "b", target=target)


def test_random_numbers_of_the_truth_are_those_of_the_call(tmp_path):
    report = aotexport.export(Drawing(), (example(),), output=tmp_path / "b", programs="infer")
    assert [program.record.refusals for program in report.programs] == [()]
    assert errors_of(tmp_path / "b")["infer.example"].keys() == {"call 0: output"}


def test_gradient_at_a_kink_may_be_that_of_its_other_side(tmp_path):
    report = aotexport.export(Kink().train(), (example(),), output=tmp_path / "b", programs="train")
    assert [program.record.refusals for program in report.programs] == [()]
    assert errors_of(tmp_path / "b")["train.example"].keys() == {"call 0: gradient of weight"}


def test_saved_bundle_keeps_the_errors(tmp_path):
    aotexport.export(Cancelling(), (example(),), output=tmp_path / "b", programs="infer")
    aotexport_runtime.save(aotexport_runtime.load(tmp_path / "b"), tmp_path / "saved")
    assert errors_of(tmp_path / "saved") == errors_of(tmp_path / "b")


@pytest.mark.parametrize(
    "model",
    [Off(2e-4, lost=0.0), Off(2e-2), Float32(), Uncopied()],
    ids=["eager is exact", "wrong by more", "float32 by name", "no copy"],
)
def test_others_are_judged_by_the_tolerance(tmp_path, model):
    with pytest.raises(aotexport.VerificationFailed) as caught:
        aotexport.export(model.train(), (example(),), output=tmp_path / "b", programs="train")
    assert "  train/example (autograd): call 0: output: relative error " in str(caught.value)
    assert model.weight.dtype == torch.float32
