"""Calls under autocast: the dtypes of eager, a variant for them, or a refusal that says why."""

import pytest
import torch
from torch import nn

import aotexport
import aotexport_runtime
from aotexport_runtime import ArgumentInvalid, CallInvalid
from tests.conformance.models import gradient_inside, leaf, linear
from tests.models import module


def test_call_under_autocast_computes_in_the_dtypes_of_eager(load):
    def scores(x, y):
        return torch.softmax(x @ y.t(), -1)

    module = load(scores, leaf(4, 6), leaf(4, 6))
    gradients = []
    for function in (module, scores):
        torch.manual_seed(0)
        x, y = leaf(4, 6), leaf(4, 6)
        with torch.autocast("cpu", torch.bfloat16):
            output = function(x, y)
        output.square().sum().backward()
        gradients.append((output, x.grad, y.grad))
    torch.testing.assert_close(gradients[0], gradients[1])


def softmax_in_float32(x):
    scores = x @ x
    return torch.softmax(scores.float(), -1).to(scores.dtype)


class SoftmaxInFloat32(torch.autograd.Function):
    """A function that returns the dtype that it is given."""

    @staticmethod
    def forward(ctx, scores):
        probabilities = torch.softmax(scores.float(), -1)
        ctx.save_for_backward(probabilities)
        return probabilities.to(scores.dtype)

    @staticmethod
    def backward(ctx, gradient):
        (probabilities,) = ctx.saved_tensors
        weighted = probabilities * gradient
        return (weighted - probabilities * weighted.sum(-1, keepdim=True)).to(gradient.dtype)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.to(x @ x) + 1,
        lambda x: x * ((x @ x).element_size() + (x @ x).itemsize + (x @ x).nbytes),
        softmax_in_float32,
        lambda x: SoftmaxInFloat32.apply(x @ x),
        gradient_inside,
        lambda x: x * 2 if torch.is_autocast_enabled("cpu") else x,
    ],
)
def test_call_under_autocast_is_refused_where_the_code_does_something_else_then(load, function):
    module = load(function, leaf(4, 4))
    torch.testing.assert_close(module(x := leaf(4, 4)), function(x))
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(CallInvalid) as caught:
        module(x)
    assert caught.value.violations == [
        "autocast: expected none around the call, as at capture, since what the model's code does depends on dtypes; "
        "got bfloat16. Export the model outside of autocast and with `--autocast bfloat16`, for both, or with its "
        "region inside of the model"
    ]


def test_code_that_asks_for_dtypes_and_does_the_same_runs_under_autocast(load):
    def function(x):
        return torch.relu(x @ x).to(x.dtype) if x.dtype.is_floating_point else x

    module, x = load(function, leaf(4, 4)), leaf(4, 4)
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(module(x), function(x))


def trained_under_autocast(model, x):
    """Return what a model computes under autocast, and its gradients."""
    with torch.autocast("cpu", torch.bfloat16):
        output = model(x)
    output.float().square().sum().backward()
    return [output, *(parameter.grad for parameter in model.parameters())]


def test_recurrent_layer_behind_another_runs_under_autocast(load):
    class Net(nn.Sequential):
        def forward(self, x):
            return self[1](self[0](x))[0]

    torch.manual_seed(0)
    net, x = Net(nn.Linear(3, 4), nn.LSTM(4, 5)), torch.randn(3, 2, 3)
    module = load(net, x)
    torch.testing.assert_close(*(trained_under_autocast(model, x) for model in (module, net)))


def in_float32_model():
    """A layer, and scores that are computed in float32."""
    return module(lambda self, x: softmax_in_float32(self.linear(x)), linear=nn.Linear(4, 4))


def test_model_captured_under_autocast_trains_under_it(tmp_path):
    torch.manual_seed(0)
    net, x = in_float32_model(), torch.randn(4, 4)
    with torch.autocast("cpu", torch.bfloat16):
        aotexport.export(net, (x,), output=tmp_path / "bundle")
    expected = trained_under_autocast(net, x)
    for target in ("auto", "portable"):
        module = aotexport_runtime.load(tmp_path / "bundle", target=target)
        torch.testing.assert_close(trained_under_autocast(module, x), expected)
        with pytest.raises(CallInvalid, match=r"autocast: expected bfloat16 around the call.*got none"):
            module(x)


def product_and_its_cast(x):
    scores = x @ x
    wide = scores.float()
    return scores, wide, wide.sum() + scores.sum()


@pytest.mark.parametrize("target", ["autograd", "portable"])
def test_conversion_without_work_is_another_value_than_its_operand_under_autocast(load, target):
    module, x = load(product_and_its_cast, leaf(4, 4), target=target), leaf(4, 4)
    for enabled in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            got, expected = module(x), product_and_its_cast(x)
        torch.testing.assert_close(got, expected)
        assert (got[0] is got[1]) == (expected[0] is expected[1]) != enabled


@pytest.fixture(scope="module")
def for_autocast(tmp_path_factory):
    """A bundle for calls with and without autocast, and its model."""
    path = tmp_path_factory.mktemp("for_autocast") / "bundle"
    torch.manual_seed(0)
    net = in_float32_model()
    report = aotexport.export(net, (torch.randn(4, 4),), output=path, autocast=torch.bfloat16)
    assert [note.text for note in report.notes if "autocast" in note.text] == [
        "calls of program `train` under autocast to bfloat16 run `train.bfloat16`",
        "calls of program `infer` under autocast to bfloat16 run `infer.bfloat16`",
    ]
    return path, net


def assert_same_with_and_without_autocast(module, net):
    x = torch.randn(4, 4)
    for enabled in (True, False, True):
        seen = []
        for model in (module, net):
            model.zero_grad()
            with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
                output = model.train()(x)
                with torch.no_grad():
                    result = model.eval()(x)
            output.float().square().sum().backward()
            seen.append([output, result, *(parameter.grad for parameter in model.parameters())])
        torch.testing.assert_close(*seen)


def test_bundle_for_autocast_serves_calls_with_and_without_it(for_autocast):
    path, net = for_autocast
    module = aotexport_runtime.load(path)
    assert_same_with_and_without_autocast(module, net)
    reason = (
        "as at capture, since what the model's code does depends on dtypes; got float16. Export the model outside of "
        "autocast and with `--autocast float16`, for both, or with its region inside of the model"
    )
    with torch.autocast("cpu", torch.float16), pytest.raises(CallInvalid) as caught:
        module.eval()(torch.randn(4, 4))
    assert caught.value.program == "infer"
    assert caught.value.violations == [
        f"variant `infer`: autocast: expected none around the call, {reason}",
        f"variant `infer.bfloat16`: autocast: expected bfloat16 around the call, {reason}",
    ]


def test_bundles_saved_and_derived_of_one_for_autocast_are_for_it(for_autocast, tmp_path):
    path, net = for_autocast
    aotexport_runtime.save(aotexport_runtime.load(path), tmp_path / "saved")
    aotexport.derive(path, output=tmp_path / "derived")
    for made in ("saved", "derived"):
        assert len(aotexport_runtime.selftest(tmp_path / made)) >= 4
        assert_same_with_and_without_autocast(aotexport_runtime.load(tmp_path / made), net)


def test_model_of_one_graph_for_autocast_gets_no_variant_and_a_note(tmp_path):
    report = aotexport.export(
        linear(), (torch.ones(4, 3),), output=tmp_path / "bundle", programs="infer", verify=False, autocast="bfloat16"
    )
    assert [note.text for note in report.notes] == [
        "calls of program `infer` under autocast to bfloat16 run its graph",
        "loads in bfloat16 (`load(dtype=)`) run graphs captured in it",
    ]
    assert [program.record.name for program in report.programs] == ["infer"]


def test_dtype_that_autocast_does_not_have_is_refused(tmp_path):
    with pytest.raises(ArgumentInvalid) as caught:
        aotexport.export(linear(), (torch.ones(4, 3),), output=tmp_path / "bundle", autocast=torch.float32)
    assert str(caught.value) == "`autocast` must be torch.bfloat16 or torch.float16, not torch.float32"
