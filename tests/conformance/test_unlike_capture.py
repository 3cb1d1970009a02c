"""Calls that differ from the captured one in what a trace cannot see: eager's result, or a refusal that says why."""

from __future__ import annotations

import copy
import functools
import inspect
import random
import re
from pathlib import Path

import numpy
import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.testing._internal.two_tensor import TwoTensor

import aotexport
import aotexport_runtime
from aotexport_runtime import ArgumentInvalid, CallInvalid, NotSupported


@pytest.fixture
def load(tmp_path):
    """Return a function that exports a callable, by default unverified, and loads the bundle."""

    def export_and_load(function, *args, target="portable", **options):
        aotexport.export(function, args, output=tmp_path / "bundle", **{"verify": False, **options})
        return aotexport_runtime.load(tmp_path / "bundle", target=target)

    return export_and_load


def leaf(*shape):
    return torch.randn(*shape, requires_grad=True)


def linear():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))


# --- gradients --------------------------------------------------------------------------------------------


def test_view_of_an_input_requires_grad_as_the_callers_tensor_does(load):
    def views(x, y):
        return x.t(), (x * y).t()

    module = load(views, leaf(4, 6), leaf(4, 6))
    x, y = torch.randn(4, 6), leaf(4, 6)
    assert [out.requires_grad for out in module(x, y)] == [out.requires_grad for out in views(x, y)] == [False, True]


def test_output_that_is_a_view_may_be_changed_by_the_caller(load):
    def turned(x):
        return (x * 2).t()

    x, twin = leaf(6, 4), leaf(6, 4)
    for function, tensor in ((load(turned, leaf(6, 4)), x), (turned, twin)):
        output = function(tensor)
        output.mul_(2)
        output.sum().backward()
    assert torch.equal(x.grad, twin.grad)


def test_batched_gradients_are_those_of_eager(load):
    net = nn.Sequential(nn.Linear(3, 6), nn.LayerNorm(6), nn.Tanh(), nn.Linear(6, 3))
    module, x = load(net, torch.randn(4, 3)), leaf(4, 3)
    module.train()
    got, expected = (torch.autograd.functional.jacobian(f, x, vectorize=True) for f in (module, net))
    torch.testing.assert_close(got, expected)


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
def test_forward_mode_derivatives_are_those_of_eager(load):
    net = linear()
    module, x = load(net, torch.randn(4, 3)), torch.randn(4, 3)
    with forward_ad.dual_level():
        got, expected = (
            forward_ad.unpack_dual(f(forward_ad.make_dual(x, torch.ones(4, 3)))).tangent for f in (module, net)
        )
    torch.testing.assert_close(got, expected)


def test_view_of_a_result_requires_grad_as_the_result_does(load):
    def views(x, y):
        doubled, shifted = x * 2, y.sigmoid()
        return doubled, doubled.t(), shifted[1:], shifted[:1]

    module = load(views, leaf(4, 6), leaf(4, 6))
    x, y = leaf(4, 6), torch.randn(4, 6)
    assert [out.requires_grad for out in module(x, y)] == [out.requires_grad for out in views(x, y)]


def test_part_that_switches_gradients_on_does_so_for_calls_without(load):
    def part(x, y):
        with torch.enable_grad():
            inside = y.sin()
        return inside, x * 2

    module = load(part, torch.randn(3), torch.randn(3))
    with torch.no_grad():
        got, expected = (function(torch.ones(3), leaf(3)) for function in (module, part))
    assert [out.requires_grad for out in got] == [out.requires_grad for out in expected] == [True, False]


@pytest.mark.parametrize(
    "net",
    [
        nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh()),
        nn.Sequential(nn.Linear(3, 4), nn.Unflatten(1, (2, 2))),
    ],
    ids=["changed buffers", "view of a result"],
)
def test_gradient_penalty_is_that_of_eager(load, net):
    torch.manual_seed(0)
    net.double()
    module, results = load(net.train(), leaf(5, 3).double()).train(), []
    x = torch.randn(5, 3, dtype=torch.double)
    for function in (copy.deepcopy(net), module):
        function.zero_grad()
        point = x.clone().requires_grad_()
        output = function(point).square().sum()
        (gradient,) = torch.autograd.grad(output, point, create_graph=True)
        (output + gradient.square().sum()).backward()
        results.append((gradient, point.grad, [p.grad for p in function.parameters()], list(function.buffers())))
    torch.testing.assert_close(*results)


def test_layers_do_not_fix_the_layout_that_their_kernels_look_at(load):
    net = nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 6))
    module, x = load(net, torch.randn(4, 6)), torch.randn(6, 4).t()
    torch.testing.assert_close(module(x), net(x))


def test_views_that_require_grad_are_recorded_as_views_of_one_tensor(load):
    def overlapping(x, y):
        return (x.contiguous() + 2 * y).sum(), x.add_(1)

    base = leaf(6, 4).clone()
    module = load(overlapping, base[:3], base[2:5], verify=True)
    results = []
    for function in (module, overlapping):
        root = torch.linspace(-1, 1, 24).reshape(6, 4).requires_grad_()
        whole = root.clone()
        output, _ = function(whole[:3], whole[2:5])
        output.backward()
        results.append((output, root.grad, whole))
    torch.testing.assert_close(*results)


def test_buffer_that_takes_part_in_autograd_is_left_as_it_was(load):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))
            self.register_buffer("last", torch.zeros(3))

        def forward(self, x):
            self.last.copy_(self.weight * x)
            return self.last.sum()

    net = Net()
    module = load(net, torch.randn(3), verify=True)
    assert not net.last.requires_grad
    results = []
    for function in (net, module):
        for _ in range(2):
            output = function.train()(torch.ones(3))
        output.backward()
        results.append((output, function.weight.grad, function.last))
    torch.testing.assert_close(*results)


def test_gradients_of_gradients_go_through_the_same_dropout(load):
    net = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Dropout(0.5)).train()
    module = load(net, torch.randn(4, 6)).train()
    x, penalties = torch.randn(4, 6), []
    for function in (module, net):
        torch.manual_seed(3)
        weight = next(function.parameters())
        (gradient,) = torch.autograd.grad(function(x).sum(), weight, create_graph=True)
        penalties.append((gradient, *torch.autograd.grad(gradient.square().sum(), weight)))
    torch.testing.assert_close(*penalties)


def test_argument_without_gradients_is_refused_where_the_model_differentiates_it(load):
    def slope(x, w):
        return torch.autograd.grad((x * w).sin().sum(), x, create_graph=True)[0]

    module = load(slope, leaf(3), leaf(3))
    assert torch.equal(module(x := leaf(3), w := torch.ones(3)), slope(x, w))
    with pytest.raises(CallInvalid) as caught:
        module(torch.ones(3), leaf(3))
    assert str(caught.value) == (
        "the call does not fit program `train`:\n"
        "  - `x`: expected requires_grad=True, as at capture, since the model takes gradients with regard to it; got "
        "False"
    )


def test_hooks_run_once_where_gradients_are_differentiable(load):
    net = linear()
    module, x, gradients = load(net, torch.randn(4, 3)).train(), torch.randn(4, 3), []
    for function in (module, net):
        weight = next(function.parameters())
        weight.register_hook(lambda gradient: gradient * 2)
        gradients.append(torch.autograd.grad(function(x).sum(), weight, create_graph=True))
    torch.testing.assert_close(*gradients)


def test_changed_weight_is_noticed_where_gradients_are_differentiable(load):
    net = linear()
    module, x = load(net, torch.randn(4, 3)).train(), leaf(4, 3)
    for function in (module, net):
        total, weight = function(x).sum(), list(function.parameters())[2]
        with torch.no_grad():
            weight.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            torch.autograd.grad(total, x, create_graph=True)


class Doubled(torch.autograd.Function):
    """x * 2, with a forward-mode derivative of its own."""

    @staticmethod
    def forward(x):
        return x * 2

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, grad):
        return grad * 5

    @staticmethod
    def jvp(ctx, tangent):
        return tangent * 11


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
def test_forward_mode_through_a_custom_function_is_refused(load):
    module = load(Doubled.apply, leaf(3))
    with pytest.raises(NotSupported, match=r"inside of torch\.func or forward-mode AD"):
        torch.func.jvp(module, (torch.ones(3),), (torch.ones(3),))


# --- the caller's surroundings ----------------------------------------------------------------------------


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


def gradient_inside(x):
    (gradient,) = torch.autograd.grad((x @ x).square().sum(), x, create_graph=True)
    return gradient


def asks_whether_autocast_is_on(x):
    return x * 2 if torch.is_autocast_enabled("cpu") else x


class ProductInFloat32(torch.autograd.Function):
    """A function that casts what it is given, and computes without autocast."""

    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu", cast_inputs=torch.float32)
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x @ x

    @staticmethod
    @torch.amp.custom_bwd(device_type="cpu")
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return gradient @ x.t() + x.t() @ gradient


def softmax_of_a_branch(x):
    scores = x @ x

    def in_float32(scores):
        return torch.softmax(scores.float(), -1).to(scores.dtype)

    return torch.cond(x.sum() > 0, in_float32, lambda scores: scores * 2, (scores,))


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


def softmax_of_a_function(x):
    return SoftmaxInFloat32.apply(x @ x)


def to_a_product(x):
    return x.to(x @ x) + 1


def to_a_contraction(x):
    return x.to(torch.einsum("ij,jk->ik", x, x)) + 1


def numbers_beside_a_product(x):
    return (x @ x).new_tensor([0.1, 0.2, 0.3, 0.4])


def promoted_with_a_product(x):
    return x.to(torch.result_type(x @ x, x @ x))


def type_of_a_product(x):
    return x.type((x @ x).type())


def bytes_of_a_product(x):
    return x * ((x @ x).element_size() + (x @ x).itemsize + (x @ x).nbytes)


@pytest.mark.parametrize(
    "function",
    [
        *(
            to_a_product,
            to_a_contraction,
            numbers_beside_a_product,
            promoted_with_a_product,
            type_of_a_product,
            bytes_of_a_product,
        ),
        softmax_in_float32,
        # Torch reads gradients of the tensors that branches use.
        pytest.param(
            softmax_of_a_branch, marks=pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
        ),
        softmax_of_a_function,
        gradient_inside,
        asks_whether_autocast_is_on,
        ProductInFloat32.apply,
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


def test_one_tensor_in_two_places_is_refused_where_the_code_asks_for_it(load):
    def function(x, y):
        return x * 2 if x is y else x + y

    module, x = load(function, torch.ones(2), torch.ones(2)), torch.ones(2)
    assert torch.equal(module(x, x.clone()), function(x, x.clone()))
    with pytest.raises(CallInvalid, match="`y`: expected another tensor than `x`, as at capture"):
        module(x, x)


def test_tangents_that_the_model_takes_are_refused_in_inference_mode(load):
    module = load(lambda x: torch.func.jvp(torch.sin, (x,), (x,))[1], torch.ones(3))
    with torch.inference_mode(), pytest.raises(CallInvalid, match=r"use torch\.no_grad"):
        module(torch.ones(3))


def test_gradients_that_the_model_takes_are_refused_in_inference_mode(load):
    module, x = load(gradient_inside, leaf(4, 4)), leaf(4, 4)
    torch.testing.assert_close(module(x), gradient_inside(x))
    message = r"gradients: torch\.inference_mode\(\) records nothing for the gradients that the model itself takes"
    with torch.inference_mode(), pytest.raises(CallInvalid, match=message):
        module(x)


def test_argument_with_hooks_is_refused_where_the_model_takes_gradients(load):
    module, x = load(gradient_inside, leaf(4, 4)), leaf(4, 4)
    handle = x.register_hook(lambda gradient: gradient * 2)
    with pytest.raises(CallInvalid, match="`x`: expected neither hooks nor a retained gradient"):
        module(x)
    handle.remove()
    torch.testing.assert_close(module(x), gradient_inside(x))


def test_hook_on_an_argument_sees_what_eager_calls_it_with_where_outputs_have_no_gradient_for_it(load):
    def function(x, y):
        return x * 2, y * 3

    module, seen = load(function, leaf(3), leaf(3)), []
    for each in (module, function):
        x, y = leaf(3), leaf(3)
        calls = []
        x.register_hook(calls.append)
        each(x, y)[1].sum().backward()
        seen.append((calls, x.grad))
    assert seen == [([], None), ([], None)]


def test_argument_that_was_the_modules_own_must_be_it_again(load):
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.rand(3))

        def forward(self, x, scale):
            return x * scale + self.scale

    net = Scaled()
    module, x = load(net, torch.ones(3), net.scale), torch.rand(3)
    assert torch.equal(module(x, module.scale), net(x, net.scale))
    with pytest.raises(CallInvalid, match="an argument that was the module's own `scale` at capture must be it again"):
        module(x, torch.rand(3))


def test_call_with_wrong_arguments_under_autocast_names_both(load):
    module = load(softmax_in_float32, leaf(4, 4))
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(CallInvalid) as caught:
        module(3)
    assert [violation.partition(":")[0] for violation in caught.value.violations] == ["`x`", "autocast"]


def test_parameter_of_another_rank_is_computed_with(load):
    model = linear()
    loaded, x = load(model, torch.randn(4, 3)), torch.randn(4, 3)
    for module in (loaded, model):
        module.get_parameter("2.bias").data = torch.arange(8.0).reshape(4, 2)
    assert torch.equal(loaded(x), model(x))


def test_code_that_asks_for_dtypes_and_does_the_same_runs_under_autocast(load):
    def function(x):
        return torch.relu(x @ x).to(x.dtype) if x.dtype.is_floating_point else x

    module, x = load(function, leaf(4, 4)), leaf(4, 4)
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(module(x), function(x))


@pytest.mark.parametrize("layer", [nn.LSTM, nn.GRU])
def test_recurrent_layer_behind_another_runs_under_autocast(load, layer):
    class Net(nn.Sequential):
        def forward(self, x):
            return self[1](self[0](x))[0]

    torch.manual_seed(0)
    net, x = Net(nn.Linear(3, 4), layer(4, 5)), torch.randn(3, 2, 3)
    module, seen = load(net, x), []
    for model in (module, net):
        with torch.autocast("cpu", torch.bfloat16):
            output = model(x)
        output.float().square().sum().backward()
        seen.append([output, *(parameter.grad for parameter in model.parameters())])
    torch.testing.assert_close(*seen)


class InFloat32(nn.Module):
    """A layer, and scores that are computed in float32."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return softmax_in_float32(self.linear(x))


@pytest.mark.parametrize("target", ["auto", "portable"])
def test_model_captured_under_autocast_trains_under_it(tmp_path, target):
    torch.manual_seed(0)
    net, x = InFloat32(), torch.randn(4, 4)
    with torch.autocast("cpu", torch.bfloat16):
        aotexport.export(net, (x,), output=tmp_path / "bundle")
    module = aotexport_runtime.load(tmp_path / "bundle", target=target)
    seen = []
    for model in (module, net):
        with torch.autocast("cpu", torch.bfloat16):
            output = model(x)
        output.float().square().sum().backward()
        seen.append([output, *(parameter.grad for parameter in model.parameters())])
    torch.testing.assert_close(*seen)
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
    net = InFloat32()
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


def test_export_and_save_leave_the_random_state(tmp_path):
    net = nn.Sequential(nn.Linear(4, 4), nn.Dropout())
    state = torch.get_rng_state()
    aotexport.export(net, (torch.ones(2, 4),), output=tmp_path / "bundle")
    aotexport_runtime.save(aotexport_runtime.load(tmp_path / "bundle"), tmp_path / "saved")
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore:.torch.jit.trace")
def test_traced_module_is_that_of_the_forward_graph(load):
    net = linear()
    module, x = load(net, torch.randn(4, 3), target="portable").train(), torch.randn(4, 3)
    torch.testing.assert_close(torch.jit.trace(module, (x + 1,))(x), net(x))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore:.torch.jit.trace")
def test_trace_of_dynamic_sizes_is_refused(load):
    module = load(linear(), torch.randn(4, 3), dynamic_shapes=({0: torch.export.Dim("batch", min=2)},))
    with pytest.raises(NotSupported, match="would hold the sizes of this call for the only ones"):
        torch.jit.trace(module, (torch.randn(4, 3),))


# --- layouts and sizes ------------------------------------------------------------------------------------


def contiguous_and_written(x):
    y = x.contiguous()
    y.mul_(3)
    return y, x + 1, x


@pytest.mark.parametrize("shape", [(4, 6), (6, 4)], ids=["copied_nothing", "copied"])
def test_contiguous_copies_in_the_calls_in_which_it_would(load, shape):
    def made(shape):
        return torch.ones(shape) if shape == (4, 6) else torch.ones(shape).t()

    module = load(contiguous_and_written, made(shape))
    for called in ((4, 6), (6, 4)):
        x, twin = made(called), made(called)
        got, expected = module(x), contiguous_and_written(twin)
        assert all(torch.equal(a, b) for a, b in zip((*got, x), (*expected, twin), strict=True))
        assert [value is x for value in got] == [value is twin for value in expected]


def moved_and_written(x):
    x.unsqueeze_(0)
    x.add_(1)
    return x.sum()


def test_views_of_one_array_are_seen_to_share_memory(load):
    def doubled(x, y):
        x.mul_(2)
        return x + y

    module, results = load(doubled, torch.ones(4), torch.ones(4), target="portable"), []
    for function in (module, doubled):
        array = numpy.arange(8, dtype=numpy.float32)
        results.append((function(torch.from_numpy(array[:4]), torch.from_numpy(array[2:6])), torch.from_numpy(array)))
    torch.testing.assert_close(*results)


def diagonal_filled(x):
    x.fill_diagonal_(1.0)
    return x.sum()


@pytest.mark.parametrize("function", [moved_and_written, diagonal_filled])
def test_input_that_begins_elsewhere_in_its_storage_is_written_in_its_place(load, function):
    module = load(function, torch.randn(3, 4))
    bases = torch.arange(24.0).reshape(2, 3, 4), torch.arange(24.0).reshape(2, 3, 4)
    views = bases[0][1], bases[1][1]
    assert module(views[0]) == function(views[1])
    assert torch.equal(*bases)
    assert (views[0].shape, views[0].storage_offset()) == (views[1].shape, views[1].storage_offset())


def test_empty_batch_and_sequence_are_served(load):
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 2, 8, batch_first=True), 1)
    dims = {0: torch.export.Dim("batch"), 1: torch.export.Dim("time")}
    module = load(encoder, torch.randn(2, 3, 4), dynamic_shapes={"src": dims}).eval()
    with torch.no_grad():
        assert module(torch.randn(0, 0, 4)).shape == (0, 0, 4)


def test_size_that_eager_refuses_is_outside_of_the_range(load):
    batch = {0: torch.export.Dim("batch")}
    module = load(nn.BatchNorm1d(4), torch.randn(3, 4), dynamic_shapes=(batch,), verify=True).train()
    with pytest.raises(CallInvalid, match=r"`batch` is 1, outside \[2:\]"):
        module(torch.randn(1, 4))
    assert module.eval()(torch.randn(1, 4)).shape == (1, 4)


def scaled(x, n, more):
    return x[: n + 1] * n - more["k"]


def test_dynamic_integers_are_numbers_of_the_call(load):
    dynamic = torch.export.Dim.DYNAMIC
    module = load(scaled, leaf(9, 2), 3, {"k": 5}, dynamic_shapes={"x": None, "n": dynamic, "more": {"k": dynamic}})
    x = leaf(9, 2)
    for n, k in ((0, -4), (1, 5), (8, 5), (2, 0)):
        assert torch.equal(module(x, n, {"k": k}), scaled(x, n, {"k": k}))
    with pytest.raises(CallInvalid) as caught:
        module(x, True, {"k": 2.0})
    assert str(caught.value) == (
        "the call does not fit program `train`:\n"
        "  - `n`: expected an int, got bool\n"
        "  - `more['k']`: expected an int, got float"
    )


def by_sign(x, n):
    return x * 2 if n > 0 else x * 3


def test_branch_on_a_dynamic_integer_is_a_guard(load):
    module = load(by_sign, torch.ones(2), 3, dynamic_shapes={"x": None, "n": torch.export.Dim.DYNAMIC}, verify=True)
    assert torch.equal(module(torch.ones(2), 1), torch.ones(2) * 2)
    with pytest.raises(CallInvalid, match=r"`n` is 0, outside \[1:\]"):
        module(torch.ones(2), 0)


def named_by_size(x):
    return x * len(f"{x.shape[0]}")


PLANS = {}
PLANNER = {"__name__": "opt_einsum.paths"}
exec("def cheapest(size): return int(size) > 0", PLANNER)


def planned_once(x):
    key = f"{tuple(x.shape)}"
    if key not in PLANS:
        PLANS[key] = PLANNER["cheapest"](x.shape[0])
    return x * 2 if PLANS[key] else x


def test_random_numbers_of_a_dynamic_size_and_no_generator_equal_eager(load):
    def noisy(x):
        return x + torch.randn(x.shape, generator=None) * torch.rand(x.shape[0], 1, generator=None)

    module = load(noisy, torch.ones(4, 2), dynamic_shapes=({0: torch.export.Dim("rows", min=1)},), verify=True)
    results: list[torch.Tensor] = []
    for function in (module, noisy):
        torch.manual_seed(0)
        results.append(function(torch.ones(7, 2)))
    assert torch.equal(*results)


def test_text_of_sizes_that_is_only_a_key_serves_other_sizes(load):
    module = load(planned_once, torch.ones(4, 2), dynamic_shapes=({0: torch.export.Dim("rows", min=1)},), verify=True)
    for rows in (4, 1, 7):
        assert torch.equal(module(torch.ones(rows, 2)), torch.ones(rows, 2) * 2)


@pytest.mark.parametrize(
    ("function", "line"),
    [
        (named_by_size, "in named_by_size: "),
        (lambda x: x * {"4": 2}.get(str(x.shape[0]), 3), "in <lambda>: "),
        (lambda x: sum(x[i] for i in range(x.shape[0])), "in <lambda>: "),
    ],
)
def test_code_that_asks_for_a_dynamic_size_is_refused_with_its_line(load, function, line):
    with pytest.raises(aotexport.ExportFailed) as caught:
        load(function, torch.ones(4, 2), dynamic_shapes=({0: torch.export.Dim("rows")},))
    message = str(caught.value)
    assert "test_unlike_capture.py" in message
    assert message.endswith(
        f"{line}`x`: axis 0 was declared dynamic as `rows`, and the model works only for size 4, since code of the "
        "model asks for the number itself. Write it with operators that take sizes, or leave this axis static"
    )


def test_size_that_a_variant_fixes_is_refused_with_its_name(tmp_path):
    def added(x, mask=None):
        return x if mask is None else x + mask

    x = torch.ones(4, 2)
    rows = {0: torch.export.Dim("rows")}
    with pytest.raises(aotexport.ExportFailed) as caught:
        aotexport.export(added, (x,), output=tmp_path / "b", variants=[(x, x * 2)], dynamic_shapes={"x": rows})
    assert "variant `infer.2` of program `infer`: " in str(caught.value)
    assert "`x`: axis 0 was declared dynamic as `rows`, and the model works only for size 4" in str(caught.value)


def halved(x):
    return x[: x.shape[0] // 2] * 2, x.narrow(0, 0, x.shape[0] - 1)


def test_sizes_that_become_one_are_served(load):
    module = load(halved, leaf(8, 2), dynamic_shapes=({0: torch.export.Dim("rows", min=2)},))
    for rows in (2, 3, 4, 9):
        x = torch.randn(rows, 2)
        assert all(torch.equal(got, expected) for got, expected in zip(module(x), halved(x), strict=True))


def test_range_of_a_hint_is_held(load):
    shapes = ({0: torch.export.Dim.DYNAMIC(min=2, max=5)},)
    module = load(lambda x: x * 2, torch.ones(3), dynamic_shapes=shapes)
    assert module(torch.ones(5)).shape == (5,)
    with pytest.raises(CallInvalid, match=r"`x\.shape\[0\]` is 6, outside \[2:5\]"):
        module(torch.ones(6))


def special_at_one(x):
    return x * 100 if x.shape[0] == 1 else x


@pytest.mark.parametrize(
    ("dimension", "name"),
    [(torch.export.Dim("batch"), "batch"), (torch.export.Dim.DYNAMIC, "x.shape[0]")],
    ids=["named", "unnamed"],
)
def test_branch_on_size_one_asks_for_a_larger_example(load, dimension, name):
    with pytest.raises(aotexport.VerificationFailed) as caught:
        load(special_at_one, torch.ones(1, 4), dynamic_shapes=({0: dimension},), verify=True)
    assert str(caught.value).splitlines()[0] == (
        f"the model does something else where `{name}` is 0 or 1, as in the example, than for larger sizes: give a "
        "larger example, and 1 is served by a variant. Nothing was written; the calls disagreed with eager execution:"
    )


def test_branch_on_size_one_is_held_for_larger_sizes(load):
    load(special_at_one, torch.ones(3, 4), dynamic_shapes=({0: torch.export.Dim("batch", min=2)},), verify=True)


def test_hint_begins_at_zero_where_the_graphs_hold_for_it(load):
    hint = ({0: torch.export.Dim.DYNAMIC},)
    module, net = load(linear(), torch.randn(4, 3), dynamic_shapes=hint, verify=True), linear()
    for rows in (0, 1, 2):
        x = torch.randn(rows, 3)
        torch.testing.assert_close(module(x), net(x))
    with pytest.raises(CallInvalid, match=r"`x\.shape\[0\]` is 1, outside \[2:\]"):
        load(lambda x: x * 2, torch.ones(3), dynamic_shapes=hint, force=True)(torch.ones(1))


def test_hint_begins_at_two_where_the_model_does_something_else_before(tmp_path):
    hint = torch.export.Dim.AUTO
    arguments, shapes = (torch.ones(3, 4), torch.ones(5)), ({0: hint}, {0: hint})
    report = aotexport.export(
        lambda x, y: (special_at_one(x), y * 2), arguments, output=tmp_path / "bundle", dynamic_shapes=shapes
    )
    assert [note.text for note in report.notes] == [
        "`x.shape[0]` is in [2:], and [0:] was declared: `infer.2` serves 1"
    ]
    module = aotexport_runtime.load(tmp_path / "bundle")
    for rows in (1, 2):
        got, doubled = module(torch.ones(rows, 4), torch.ones(1))
        assert torch.equal(got, special_at_one(torch.ones(rows, 4)))
        assert torch.equal(doubled, torch.ones(1) * 2)
    with pytest.raises(CallInvalid, match=r"`x\.shape\[0\]` is 0, outside \[2:\]"):
        module(torch.ones(0, 4), torch.ones(5))
    assert aotexport_runtime.selftest(tmp_path / "bundle")


def picked_rows(x, labels):
    mask = torch.zeros(x.shape[0], 6).index_put((torch.arange(x.shape[0]), labels), torch.ones(()))
    return x + mask * x[mask == 1].cos().unsqueeze(1)


def up_to_the_longest(x, lengths):
    steps = torch.arange(int(lengths.max())).expand(lengths.shape[0], -1)
    return x.masked_fill((steps >= lengths[:, None])[..., None], 0.0)


def of_bags(x, indices, offsets):
    return x + nn.functional.embedding_bag(indices, torch.arange(40.0).view(10, 4), offsets, mode="sum")


def along_edges(x, edges):
    return x.index_add(0, edges[1], x[edges[0]] * 2)


def by_columns(x):
    return x[:, :1] * nn.functional.embedding(x[:, 1:].long(), torch.arange(40.0).view(10, 4)).sum(1)


ONE_ROW = {
    "picked_rows": (picked_rows, lambda n: (torch.randn(n, 6), torch.arange(1, n + 1) % 6), (0, 0)),
    "lengths": (up_to_the_longest, lambda n: (torch.randn(n, 9, 2), torch.tensor([9, 7, 5])[:n].flip(0)), (0, 0)),
    "offsets": (of_bags, lambda n: (torch.randn(n, 4), torch.tensor([7, 1, 3, 9, 2]), torch.arange(n)), (0, None, 0)),
    "edges": (along_edges, lambda n: (torch.randn(n, 4), torch.arange(10).reshape(2, 5) % n), (0, None)),
    "indices": (by_columns, lambda n: (torch.tensor([[80.5, 1, 9], [99, 0, 8], [70, 2, 9]])[:n],), (0,)),
}


@pytest.mark.parametrize("name", ONE_ROW)
def test_one_row_is_served_where_eager_serves_one(name, load):
    function, arguments, axes = ONE_ROW[name]
    dynamic = tuple(None if axis is None else {axis: torch.export.Dim("batch", min=1, max=8)} for axis in axes)
    module = load(function, *arguments(3), dynamic_shapes=dynamic, verify=True)
    (dimension,) = module.bundle.program("infer").dimensions
    assert (dimension.min, module.bundle.program("infer").notes) == (1, ())
    for rows in (1, 2):
        args = arguments(rows)
        torch.testing.assert_close(module(*args), function(*args))


class PairLoss(nn.Module):
    """The mean distance of rows with one label; nothing to learn where no two rows have one."""

    def __init__(self):
        super().__init__()
        self.net = nn.Linear(4, 3)

    def forward(self, x, labels):
        y = self.net(x)
        first, second = (labels[:, None] == labels).fill_diagonal_(False).nonzero().unbind(1)
        return (y[first] - y[second]).square().sum(1).mean() if len(first) else (y * 0).sum()


class LastSize(nn.Module):
    """Does something else where the last call had another number of rows."""

    def __init__(self):
        super().__init__()
        self.both, self.net = 2, nn.Linear(4, 3)

    def forward(self, x):
        y = self.net(x)
        if self.both != 2 * x.shape[0]:
            self.both, y = 2 * x.shape[0], y * 2
        return y


class BranchOnOne(LastSize):
    def forward(self, x):
        return special_at_one(self.net(x))


def labelled(rows):
    return torch.randn(rows, 4), torch.arange(rows) // 2


APART = {
    "pairs": (PairLoss, labelled, "`batch` is in [2:], and [1:] was declared: `{}.2` serves 1"),
    "branch": (BranchOnOne, lambda n: labelled(n)[:1], "`batch` is in [2:], and [1:] was declared: `{}.2` serves 1"),
    "guard": (LastSize, lambda n: labelled(n)[:1], "calls of program `{0}` with 1 as `batch` run `{0}.3`"),
}


@pytest.mark.parametrize("name", APART)
def test_one_row_that_goes_another_way_is_served_by_a_variant(name, load, tmp_path):
    net, arguments, note = APART[name]
    torch.manual_seed(0)
    net, batch = net(), torch.export.Dim("batch", min=1)
    twin, dynamic = copy.deepcopy(net), tuple({0: batch} for _ in arguments(1))
    module = load(net, *arguments(6), dynamic_shapes=dynamic, verify=True, target="auto")
    for program in ("train", "infer"):
        assert note.format(program) in [each.text for each in module.bundle.program(program).notes]
    assert all(module.bundle.program(each).functional is not None for each in module.bundle.program_names)
    for each in (module, twin):
        each.train()
    for rows in (1, 6, 1, 1, 2, 3):
        args = arguments(rows)
        got, expected = module(*args), twin(*args)
        torch.testing.assert_close(got, expected)
        got.sum().backward()
        expected.sum().backward()
    for mine, theirs in zip(module.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)
    module.eval(), twin.eval()
    for rows in (3, 1, 1):
        args = arguments(rows)
        torch.testing.assert_close(module(*args), twin(*args))
    assert not any(result.not_run for result in aotexport_runtime.selftest(tmp_path / "bundle"))


def test_one_row_that_goes_another_way_is_served_in_another_dtype(load, tmp_path):
    net, batch = BranchOnOne().eval(), {0: torch.export.Dim("batch", min=1)}
    options = {"programs": "infer", "autocast": "bfloat16", "verify": True}
    bundle = load(net, torch.randn(6, 4), dynamic_shapes=(batch,), **options).bundle
    own = "loads in bfloat16 (`load(dtype=)`) run graphs captured in it"
    assert [own in [n.text for n in bundle.program(each).notes] for each in ("infer", "infer.2")] == [True, True]
    module, twin = aotexport_runtime.load(tmp_path / "bundle", dtype=torch.bfloat16), net.bfloat16()
    for rows in (2, 1, 5):
        x = torch.randn(rows, 4, dtype=torch.bfloat16)
        with torch.no_grad():
            assert torch.equal(module.eval()(x), twin(x))


def by_mean(x):
    return x * 2 if x.mean() > 0 else x - 1


def test_one_row_whose_values_lead_another_way_needs_no_variant(load):
    x = torch.tensor([[-5.0], [-5.0], [20.0], [-5.0]])
    module = load(by_mean, x, dynamic_shapes=({0: torch.export.Dim("batch", min=1)},), verify=True)
    (note,) = module.bundle.program("infer").notes
    assert "as a call with other values did at the export" in note.outside
    assert ([*module.bundle.program_names], module.bundle.program("infer").dimensions[0].min) == (["infer"], 1)
    assert torch.equal(module(torch.ones(1, 1)), by_mean(torch.ones(1, 1)))


@pytest.mark.filterwarnings("ignore:where received a uint8")
def test_mask_of_bytes_chooses_as_in_eager(load):
    def function(x, mask):
        return torch.where(mask, x, 0.0) + torch.where(mask, x, x * 2)

    mask = torch.tensor([1, 0, 2], dtype=torch.uint8)
    module, x = load(function, leaf(2, 3), mask), torch.randn(2, 3, requires_grad=True)
    assert torch.equal(module(x, mask.flip(0)), function(x, mask.flip(0)))


def test_size_that_eager_fails_at_is_a_note_with_its_error(tmp_path):
    dynamic = ({0: torch.export.Dim("rows")},)
    report = aotexport.export(lambda x: x / x[1], (torch.randn(4, 2),), output=tmp_path / "b", dynamic_shapes=dynamic)
    assert [note.text for note in report.notes] == [
        "`rows` is in [2:], and [0:] was declared: the model fails where it is 1 (IndexError: index 1 is out of bounds "
        "for dimension 0 with size 1)"
    ]


def turned_and_back(x):
    y = x * 2
    return y.t().contiguous().t(), y.t()


def test_functional_graph_that_is_wrong_for_one_row_serves_more(load, tmp_path):
    batch = torch.export.Dim("batch")
    module = load(turned_and_back, leaf(4, 3), dynamic_shapes=({0: batch},), verify=True)
    assert aotexport_runtime.open_bundle(tmp_path / "bundle").program("train").functional is not None
    for rows in (1, 2):
        got = [t.untyped_storage().data_ptr() for t in module(leaf(rows, 3))]
        assert len(set(got)) == rows


def by_layout(x):
    return x + 1 if x.is_contiguous() else x - 1


def test_call_in_another_layout_is_refused_where_python_read_it(load):
    module = load(by_layout, torch.randn(4, 6))
    with pytest.raises(CallInvalid) as caught:
        module(torch.randn(6, 4).t())
    assert str(caught.value) == (
        "the call does not fit program `infer`:\n"
        "  - `x`: expected strides (6, 1) and storage offset 0, as at capture, since the model's code reads the layout "
        "of tensors; got (1, 4) and 0"
    )


def in_a_package(name):
    """Return `by_layout` as code of an installed package."""
    names = {}
    file = Path(torch.__file__).parents[1] / name / "layers.py"
    exec(compile(inspect.getsource(by_layout), str(file), "exec"), names)
    return names["by_layout"]


@pytest.mark.parametrize("package", ["torchvision", "torch_geometric"])
def test_code_of_a_package_that_is_named_like_torch_counts_as_the_models(load, package):
    module = load(in_a_package(package), torch.randn(4, 6))
    with pytest.raises(CallInvalid, match="since the model's code reads the layout of tensors"):
        module(torch.randn(6, 4).t())


def by_requires_grad(x, w):
    return x * w if x.requires_grad else x + w


def test_call_with_other_gradients_is_refused_where_python_read_them(load):
    module = load(by_requires_grad, torch.randn(4), leaf(4))
    with pytest.raises(CallInvalid) as caught:
        module(leaf(4), leaf(4))
    assert str(caught.value) == (
        "the call does not fit program `train`:\n"
        "  - `x`: expected requires_grad=False, as at capture, since the model's code reads it; got True. "
        "Set it so, or export the model with it as it is now"
    )


def conjugates(z):
    return z * 2, z.conj(), z.real


@pytest.mark.parametrize(
    ("function", "served"),
    [
        (lambda x: x * (2 if x.is_leaf else 3), False),
        (lambda x: x * (2 if x.grad_fn is None else 3), False),
        (lambda x: x * (2 if x.requires_grad else 3), True),
    ],
    ids=["is_leaf", "grad_fn", "requires_grad"],
)
def test_argument_with_a_history_is_refused_where_python_read_that_it_had_none(load, function, served):
    module = load(function, leaf(4))

    if served:
        x = leaf(4) * 1
        assert torch.equal(module(x), function(x))
        return
    with pytest.raises(CallInvalid) as caught:
        module(leaf(4) * 1)
    assert str(caught.value) == (
        "the call does not fit program `train`:\n"
        "  - `x`: expected is_leaf=True, as at capture, since the model's code reads it; got False"
    )


@pytest.mark.parametrize("asks", [lambda x: torch.is_inference_mode_enabled(), lambda x: x.is_inference()])
def test_call_in_inference_mode_is_refused_where_the_code_asks_for_it(load, asks):
    module = load(lambda x: x * 2 if asks(x) else x * 3, torch.ones(3))
    assert torch.equal(module(torch.ones(3)), torch.full((3,), 3.0))
    with torch.inference_mode(), pytest.raises(CallInvalid, match="asks whether it is on"):
        module(torch.ones(3))


FACTORS = {1: 2.0, 64: 3.0}


class LooksUpASize(torch.nn.Module):
    """Looks a size up in a dict, which Dynamo alone follows, and branches on another."""

    table = FACTORS

    def forward(self, x):
        factor = self.table.get(x.shape[1], 2.0)
        return x * factor if x.shape[0] > 3 else x * 5


def test_size_of_one_that_dynamo_takes_for_a_constant_is_not_captured_as_dynamic(tmp_path):
    either = torch.export.Dim.DYNAMIC
    model, args, shapes = LooksUpASize(), (torch.ones(5, 1),), ({0: either, 1: either},)
    with pytest.raises(aotexport.ExportFailed, match="a size declared dynamic is 0 or 1 in the example"):
        aotexport.export(model, args, output=tmp_path / "b", dynamic_shapes=shapes, verify=False)


def test_conjugated_argument_is_served(load):
    z = torch.randn(4, dtype=torch.complex64)
    module = load(conjugates, z)
    assert all(torch.equal(got, expected) for got, expected in zip(module(z.conj()), conjugates(z.conj()), strict=True))


def checked(x):
    torch._assert_async(x.sum() < 1e9)
    return x * 2


@pytest.mark.parametrize("target", ["portable", "autograd"])
def test_asserts_on_values_hold_in_both_graphs(load, target):
    module = load(checked, torch.ones(3), target=target)
    with pytest.raises(RuntimeError, match="Expected Tensor with single nonzero value"):
        module(torch.ones(3) + 1e10)


# --- constants --------------------------------------------------------------------------------------------


def test_zero_of_another_sign_is_refused(load):
    module = load(lambda x, n: x / n, torch.ones(2), 0.0)
    with pytest.raises(CallInvalid, match=r"`n`: expected 0\.0, as at capture, got -0\.0"):
        module(torch.ones(2), -0.0)


def test_keywords_in_another_order_are_refused(tmp_path):
    def values(x, **rest):
        return [x, *rest.values()]

    a, b = torch.ones(1), torch.zeros(1)
    aotexport.export(values, (a,), {"a": a.clone(), "b": b}, output=tmp_path / "bundle", verify=False)
    module = aotexport_runtime.load(tmp_path / "bundle")
    with pytest.raises(CallInvalid, match="keyword arguments a, b: expected in this order, as at capture"):
        module(a, b=b, a=a)


class WithDefault(nn.Module):
    def forward(self, x, y=torch.ones(2, 3)):  # noqa: B008 (what is tested)
        return x + y


def test_tensor_that_is_a_default_is_a_constant(load):
    module = load(WithDefault(), leaf(2, 3), verify=True)
    x = torch.randn(2, 3)
    assert torch.equal(module(x), x + 1)
    assert torch.equal(module.eval()(x), x + 1)
    with pytest.raises(CallInvalid, match="`y`: expected None, as at capture"):
        module(x, torch.zeros(2, 3))


# --- state ------------------------------------------------------------------------------------------------


class Scaled(nn.Module):
    """Multiplies by a number that Python reads from a buffer."""

    def __init__(self):
        super().__init__()
        self.register_buffer("n", torch.tensor(3))

    def forward(self, x):
        return x * int(self.n)


def test_number_read_from_a_buffer_follows_the_buffer(load):
    module = load(Scaled(), torch.ones(4))
    module.n.fill_(2)
    assert torch.equal(module(torch.ones(4)), torch.full((4,), 2.0))


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.second.weight = self.first.weight

    def forward(self, x):
        return self.second(self.first(x))


def test_untied_weights_are_refused(load):
    module = load(Tied(), torch.ones(2, 4))
    module.second.weight = nn.Parameter(torch.ones(4, 4))
    with pytest.raises(NotSupported) as caught:
        module(torch.ones(2, 4))
    assert str(caught.value) == (
        "`first.weight`, `second.weight` are one tensor in the programs, and no longer are in the module"
    )


def test_hooks_on_parameters_are_refused_at_export(tmp_path):
    net = linear()
    net[0].weight.register_hook(lambda gradient: gradient * 2)
    with pytest.raises(aotexport.ExportFailed, match=r"`0\.weight` has hooks, which a bundle cannot hold"):
        aotexport.export(net, (torch.randn(4, 3),), output=tmp_path / "bundle")


def test_module_with_untied_weights_is_not_saved(load, tmp_path):
    module = load(Tied(), torch.ones(2, 4))
    module.second.weight = nn.Parameter(torch.ones(4, 4))
    with pytest.raises(NotSupported, match=r"`first\.weight`, `second\.weight` are one tensor in the programs"):
        aotexport_runtime.save(module, tmp_path / "saved")
    twin = copy.deepcopy(module)
    with pytest.raises(NotSupported, match=r"`first\.weight`, `second\.weight` are one tensor in the programs"):
        twin(torch.ones(2, 4))


class Clamped(nn.Module):
    """Changes its weight where no version counter sees it."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3) * 5)

    def forward(self, x):
        self.weight.data.mul_(0.5)
        return x * self.weight


def test_export_leaves_weights_that_the_call_changes_unseen(load):
    net = Clamped()
    module = load(net, torch.ones(3), verify=True)
    assert torch.equal(net.weight, torch.ones(3) * 5)
    assert torch.equal(module(torch.ones(3)), torch.ones(3) * 2.5)


class Doubling(nn.Module):
    def forward(self, x):
        return x * 2


def test_module_without_parameters_is_served_in_both_modes(load):
    module = load(Doubling(), torch.ones(3))
    assert torch.equal(module.train()(torch.ones(3)), module.eval()(torch.ones(3)))


class Force(nn.Module):
    """Takes gradients of its own, with gradients on or not at all."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def forward(self, x):
        x = x.detach().requires_grad_()
        return torch.autograd.grad(self.layer(x).sin().sum(), x, create_graph=self.training)[0]


def test_model_that_takes_gradients_has_them_in_both_modes(load):
    net, x = Force(), torch.randn(3, 4)
    module = load(net, torch.randn(3, 4), verify=True)
    for mode in (True, False):
        got, expected = module.train(mode)(x), net.train(mode)(x)
        torch.testing.assert_close(got, expected)
        assert got.requires_grad == expected.requires_grad == mode


class Streamed(nn.Module):
    """A recurrent layer that goes on from the state that the call before has left."""

    def __init__(self):
        super().__init__()
        self.layer = nn.GRU(2, 3)
        self.state = None

    def forward(self, x):
        output, state = self.layer(x, self.state)
        self.state = state.detach()
        return output


def test_recurrent_layer_goes_on_from_the_state_that_the_last_call_left(load):
    torch.manual_seed(0)
    model = Streamed()
    module, twin = load(model, torch.randn(4, 1, 2)), copy.deepcopy(model)
    for _ in range(3):
        x = torch.randn(4, 1, 2)
        got, expected = module(x), twin(x)
        assert torch.equal(got, expected)
        got.sum().backward()
        expected.sum().backward()
    gradients = dict(module.named_parameters())
    assert all(torch.equal(gradients[name].grad, weight.grad) for name, weight in twin.named_parameters())


# --- what a trace does not see ----------------------------------------------------------------------------


def draws_from_its_own_generator(x):
    return x * torch.rand(3, generator=torch.Generator().manual_seed(4))


def forks_the_random_state(x):
    with torch.random.fork_rng():
        return x * torch.rand(3)


class ReturnsItself(nn.Module):
    def forward(self, x):
        return x, self


class Converting(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x):
        return self.layer.double()(x.double())


@pytest.mark.parametrize(
    ("target", "message"),
    [
        (draws_from_its_own_generator, r"draws from a `torch\.Generator` of the model's own"),
        (forks_the_random_state, r"the model calls `torch\.random\.fork_rng`, which a bundle cannot hold"),
        (ReturnsItself(), r"output `output\[1\]` is a `.*ReturnsItself`, which a bundle cannot hold"),
        (Converting(), r"the model calls `Module\.to` \(or the like\), which changes `weight`"),
        (nn.BatchNorm1d(3), "the model fails on the example inputs in train mode: ValueError: expected 2D or 3D"),
        (nn.Linear(3, 3, device="meta"), "`weight` is on the meta device, and has no values"),
    ],
)
def test_what_a_bundle_cannot_hold_is_refused_by_name(tmp_path, target, message):
    with pytest.raises(aotexport.ExportFailed, match=message):
        aotexport.export(target, (torch.ones(3),), output=tmp_path / "bundle")


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
def test_torchscript_is_refused_by_name(tmp_path):
    net = nn.Sequential(nn.Linear(3, 3), torch.jit.script(nn.Linear(3, 3)))
    with pytest.raises(aotexport.ExportFailed, match="`1` is TorchScript, whose code a trace does not see"):
        aotexport.export(net, (torch.ones(3),), output=tmp_path / "bundle")


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_weights_packed_for_kernels_are_refused_with_a_way_out(tmp_path):
    net = torch.ao.quantization.quantize_dynamic(nn.Sequential(nn.Linear(3, 3)), {nn.Linear}, dtype=torch.qint8)
    with pytest.raises(aotexport.ExportFailed, match=r"`0._packed_params._packed_params` holds .* by torchao"):
        aotexport.export(net, (torch.ones(3),), output=tmp_path / "bundle")


# --- Python containers ------------------------------------------------------------------------------------


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.seen = nn.Linear(3, 3), []

    def forward(self, x):
        self.seen.append(1)
        return self.layer(x) * len(self.seen)


class Accumulating(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.sums = nn.Linear(3, 3), {"a": torch.zeros(3)}

    def forward(self, x):
        self.sums["a"] = self.sums["a"] + 1
        return self.layer(x) + self.sums["a"]


class Hooked(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x):
        self.layer.register_forward_hook(lambda module, args, output: output * 2)
        return self.layer(x)


def test_call_that_registers_hooks_is_refused(tmp_path):
    with pytest.raises(aotexport.ExportFailed, match="the call registers hooks on modules"):
        aotexport.export(Hooked(), (torch.ones(2, 3),), output=tmp_path / "bundle")


@pytest.mark.parametrize(("module", "name"), [(Counting(), "seen"), (Accumulating(), "sums")], ids=["list", "dict"])
def test_export_leaves_containers_as_they_were(tmp_path, module, name):
    before = copy.deepcopy(getattr(module, name))
    aotexport.export(module, (torch.ones(2, 3),), output=tmp_path / "bundle", programs=("infer",))
    torch.testing.assert_close(getattr(module, name), before)


class PreparedOnFirstCall(nn.Module):
    """Registers a hook at its first call, as model libraries do to record hidden states."""

    def __init__(self):
        super().__init__()
        self.layer, self.ready = nn.Linear(3, 3), False

    def forward(self, x):
        if not self.ready:
            self.layer.register_forward_hook(lambda module, args, output: output * 2)
            self.ready = True
        return self.layer(x)


def test_model_that_is_prepared_by_its_first_call_is_exported_as_after_it(load):
    net = PreparedOnFirstCall()
    module, x = load(net, torch.ones(2, 3), verify=True), torch.randn(2, 3)
    torch.testing.assert_close(module(x), net(x))
    assert len(net.layer._forward_hooks) == 1


class FilledOnFirstCall(nn.Module):
    """Keeps a table in a buffer that is empty before the first call."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("table", None)

    def forward(self, x):
        if self.table is None:
            self.table = torch.ones(4) * 3
        return self.layer(x) * self.table


def test_buffer_that_the_first_call_fills_is_computed_anew(load):
    net = FilledOnFirstCall()
    module, x = load(net, torch.ones(2, 4), verify=True), torch.randn(2, 4)
    torch.testing.assert_close(module(x), net(x))
    assert type(net.table) is torch.Tensor


@pytest.mark.parametrize("target", [nn.Linear, "model", None])
def test_what_is_no_module_or_function_is_refused(tmp_path, target):
    with pytest.raises(aotexport.ModelFileInvalid, match="what to export must be a module or a function of tensors"):
        aotexport.export(target, (torch.ones(1),), output=tmp_path / "bundle")


@pytest.mark.parametrize("args", [None, torch.ones(1)])
def test_example_arguments_that_are_no_tuple_are_refused(tmp_path, args):
    with pytest.raises(aotexport.ModelFileInvalid, match=r"must be a tuple, got \w+; write `\(x,\)` for one"):
        aotexport.export(linear(), args, output=tmp_path / "bundle")


def test_device_that_is_not_here_is_refused(tmp_path):
    aotexport.export(linear(), (torch.randn(4, 3),), output=tmp_path / "bundle", verify=False)
    with pytest.raises(NotSupported, match="no device `nonsense` here"):
        aotexport_runtime.load(tmp_path / "bundle", device="nonsense")


# --- what code reads and leaves outside of its tensors ------------------------------------------------------


class ByGradMode(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x):
        with torch.no_grad():
            assert not torch.is_grad_enabled()
        return x * self.weight if torch.is_grad_enabled() else x - self.weight


def test_code_that_reads_the_grad_mode_is_captured_in_that_of_the_program(load):
    module, x = load(ByGradMode(), torch.randn(3), verify=True), torch.arange(3.0)
    assert torch.equal(module(x), x)
    with torch.no_grad():
        assert torch.equal(module.eval()(x), x - 1)
        with pytest.raises(CallInvalid) as caught:
            module.train()(x)
    assert str(caught.value) == (
        "the call does not fit program `train`:\n"
        "  - gradients: expected torch.is_grad_enabled() to be True, as at capture, since the model's code reads it; "
        "got False"
    )


class AskingBeside(nn.Linear):
    checkpoints = False

    def forward(self, x):
        if torch.is_grad_enabled() and self.checkpoints:
            return torch.utils.checkpoint.checkpoint(super().forward, x, use_reentrant=False)
        return super().forward(x)


@pytest.mark.parametrize("shapes", [None, ({0: torch.export.Dim("rows", min=2)},)], ids=["static", "dynamic"])
def test_code_that_reads_the_grad_mode_and_does_the_same_in_both_is_served_in_both(load, shapes):
    example = torch.randn(4, 3)
    module, x = load(AskingBeside(3, 2), example, dynamic_shapes=shapes, verify=True), torch.randn(4, 3)
    for called in (module.train(), module.eval()):
        with torch.no_grad():
            expected = called(x)
        assert torch.equal(called(x), expected)
        assert called(x).requires_grad


def fixes_a_size_without_gradients(x):
    if not torch.is_grad_enabled() and x.shape[0] != 4:
        return x - 1
    return x + 1


def test_code_that_does_the_same_in_both_grad_modes_for_the_example_alone_is_held_to_one(load):
    module = load(fixes_a_size_without_gradients, leaf(4, 2), dynamic_shapes=({0: torch.export.Dim("rows", min=2)},))
    assert torch.equal(module(torch.ones(7, 2, requires_grad=True)), torch.full((7, 2), 2.0))
    with torch.no_grad(), pytest.raises(CallInvalid, match="is_grad_enabled"):
        module(torch.ones(7, 2))


_TABLES = {}
_COUNT = {"calls": 0}


@functools.lru_cache
def remembered(count):
    return torch.arange(count).float()


class Remembering(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)

    @functools.lru_cache  # noqa: B019
    def scale(self, count):
        return torch.full((count,), 2.0)

    def forward(self, x):
        if len(x) not in _TABLES:
            _TABLES[len(x)] = torch.arange(len(x)).float()
        return self.linear(x) + remembered(len(x))[:, None] * _TABLES[len(x)][:, None] * self.scale(len(x))[:, None]


def test_tensors_that_code_remembers_are_those_of_the_graph(load):
    net, x = Remembering(), torch.randn(4, 3)
    module = load(net, x, verify=True)
    assert torch.equal(module(x), net(x))
    assert remembered(4).tolist() == [0, 1, 2, 3]


def test_tensors_that_a_call_stores_outside_of_the_module_are_told_and_the_places_left_alone(load, tmp_path):
    last, by_name = [], {"inputs": []}

    class Logging(nn.Module):
        means = []

        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(3, 3)
            self.linear.register_forward_hook(lambda module, args, result: _TABLES.update(result=result.detach()))

        def forward(self, x):
            self.means.append(x.mean())
            last.append(x)
            by_name["inputs"].append(x)
            Logging.size = x.shape[0]
            return self.linear(x)

    load(Logging(), torch.ones(3))
    notes = [note.text for note in aotexport_runtime.open_bundle(tmp_path / "bundle").program("infer").notes]
    assert (_TABLES.get("result"), Logging.means, last, by_name) == (None, [], [], {"inputs": []})
    assert not hasattr(Logging, "size")
    assert {note for note in notes if "outside of the module" in note} == {
        f"the call stores {what}, outside of the module; a call of the bundle does not"
        for what in (
            *(f"a tensor in `{name}`" for name in ("_TABLES['result']", "Logging.means[0]", "last[0]")),
            "a tensor in `by_name['inputs'][0]`",
            "a number in `Logging.size`",
        )
    }


def counting(x):
    _COUNT["calls"] += 1
    return x * _COUNT["calls"]


class Counting(nn.Module):
    calls = 0

    def forward(self, x):
        Counting.calls += 1
        return x * Counting.calls


def counter():
    calls = 0

    def count(x):
        nonlocal calls
        calls += 1
        return x * calls

    return count


def by_chance(x):
    return x * random.random()


def by_numpy(x):
    return x * float(numpy.random.rand())


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (
            counting,
            "the call changes the number `_COUNT['calls']`, which is in no module, and a bundle has no other",
        ),
        (
            Counting(),
            "the call changes the number `Counting.calls`, which is in no module, and a bundle has no other",
        ),
        (
            counter(),
            "the call changes the number `calls`, which is in no module, and a bundle has no other",
        ),
        (by_chance, "the call draws from Python's `random`, and a bundle draws from torch's default generator alone"),
        (by_numpy, "the call draws from NumPy's `random`, and a bundle draws from torch's default generator alone"),
        (lambda x: x * torch.initial_seed(), "the model calls `torch.initial_seed`, which a bundle cannot hold"),
    ],
)
def test_what_is_another_number_in_every_call_is_refused(load, function, reason):
    with pytest.raises(aotexport.ExportFailed, match=re.escape(reason)):
        load(function, torch.ones(3))


@pytest.mark.filterwarnings("ignore:std.*degrees of freedom is <= 0:UserWarning")
def test_gradient_that_divides_by_a_size_less_one_is_that_of_eager(load):
    def spread(x):
        return x.std(0)

    module = load(spread, leaf(4, 2), dynamic_shapes=({0: torch.export.Dim("rows")},))
    for rows in (1, 2):
        x = torch.arange(2.0 * rows).reshape(rows, 2)
        got, expected = (
            torch.autograd.grad(f(point).sum(), point)
            for f in (module, spread)
            for point in [x.clone().requires_grad_()]
        )
        torch.testing.assert_close(got, expected, equal_nan=True)


def test_dynamic_sizes_of_a_tensor_subclass_are_refused_by_name(load):
    x = TwoTensor(torch.ones(3), torch.ones(3))
    with pytest.raises(
        aotexport.ExportFailed, match="`x` is a `TwoTensor`, and the sizes of tensor subclasses are fixed"
    ):
        load(named_by_size, x, dynamic_shapes=({0: torch.export.Dim("rows")},))


def test_other_member_of_an_enumeration_or_other_range_is_refused(load):
    from tests.cases.structure import Scaling, enumeration_and_range

    module = load(enumeration_and_range, leaf(3), Scaling.TWICE, range(1, 7, 3))
    x = leaf(3)
    assert torch.equal(module(x, Scaling.TWICE, range(1, 7, 3)), enumeration_and_range(x, Scaling.TWICE, (1, 4)))
    with pytest.raises(CallInvalid, match=r"`scaling\.name`: expected 'TWICE', as at capture, got 'NEVER'"):
        module(x, Scaling.NEVER, range(1, 7, 3))
    with pytest.raises(CallInvalid, match=r"`exponents`: expected range\(1, 7, 3\), as at capture, got "):
        module(x, Scaling.TWICE, range(1, 8, 3))


def test_other_set_is_refused(load):
    from tests.cases.structure import sets_and_tuple_keys

    edges = {("user", "rates"): leaf(3), ("user", 1): leaf(3)}
    module = load(sets_and_tuple_keys, leaf(3), {"twice", 3, None}, edges)
    for other in ({"twice", 3}, {"twice", 3.0, None}, frozenset(("twice", 3, None))):
        with pytest.raises(CallInvalid, match=r"`flags`: expected {.*}, as at capture, got "):
            module(leaf(3), other, edges)
    with pytest.raises(CallInvalid, match="`edges`: expected a dict with keys"):
        module(leaf(3), {"twice", 3, None}, {("user", "rates"): leaf(3), ("user", 2): leaf(3)})


def test_other_keys_and_classes_of_sequences_are_refused(load):
    from tests.cases.structure import Boxes, numbers_and_bytes_as_keys

    table = {0.5: torch.ones(3), b"ab": torch.ones(3), (1.0, b""): torch.ones(3)}
    module = load(numbers_and_bytes_as_keys, leaf(3), table, Boxes([torch.ones(3), torch.ones(3)]))
    with pytest.raises(CallInvalid) as caught:
        module(leaf(3), {0.5: leaf(3), b"": leaf(3), (1.0, b""): leaf(3)}, [leaf(3), leaf(3)])
    assert str(caught.value) == (
        "the call does not fit program `train`:\n"
        "  - `table`: expected a dict with keys [0.5, b'ab', (1.0, b'')] in this order; missing: b'ab'; "
        "unexpected: b''\n"
        "  - `boxes`: expected a Boxes of 2, got a list of 2"
    )
    one = load(lambda table: table[(1,)] * 2, {(1,): torch.ones(2)}, force=True)
    with pytest.raises(CallInvalid, match=r"keys \[\(1,\)\] in this order, got a dict with keys \[\(1\.0,\)\]"):
        one({(1.0,): torch.ones(2)})


class Labelled(dict):
    def __init__(self, **items):
        super().__init__(**items)
        self.label = "a"


@pytest.mark.parametrize(
    ("argument", "reason"),
    [
        (
            {torch.ones(2)},
            "input `other` is a set with a `torch.Tensor`; sets may hold numbers, strings, None and dtypes",
        ),
        (
            numpy.ones(2)[::-1],
            "`other` is an array of float64 with strides (-8,), which no tensor has; pass a copy",
        ),
        (
            1 << 64,
            "input `other` is an integer of more than 64 bits, which a bundle cannot hold. Pass tensors, numbers",
        ),
        ("\ud800", "input `other` is the string '\\ud800', no Unicode text, which a bundle cannot hold. Pass tensors"),
        (Labelled(x=1), "is a `Labelled` with the attribute `label` beside its items, which a bundle does not look at"),
        ({float("inf"): torch.ones(2)}, "has the key inf; keys may be strings, numbers, bytes, booleans, None or"),
    ],
    ids=["set of tensors", "array", "large integer", "surrogate", "attribute", "key"],
)
def test_argument_that_a_bundle_cannot_hold_is_refused_with_a_way_out(load, argument, reason):
    with pytest.raises(aotexport.ExportFailed, match=re.escape(reason)):
        load(lambda x, other: x, leaf(3), argument)


def test_number_of_a_range_is_no_dynamic_integer(load):
    from tests.cases.structure import Scaling, enumeration_and_range

    shapes = (None, None, {"stop": torch.export.Dim("stop")})
    with pytest.raises(aotexport.AotExportError, match="dynamic_shapes: `exponents"):
        load(enumeration_and_range, leaf(3), Scaling.TWICE, range(1, 7, 3), dynamic_shapes=shapes)


class Activations(dict):
    """A table that makes what it is asked for, as model libraries have them in globals."""

    def __getitem__(self, name):
        return super().__getitem__(name)()

    def __iter__(self):
        yield from ()


ACTIVATIONS = Activations(tanh=nn.Tanh)


def test_global_table_that_makes_what_it_is_asked_for_stays_as_it_is(load):
    def activated(x):
        return ACTIVATIONS["tanh"](x)

    x = leaf(3)
    assert torch.equal(load(activated, leaf(3))(x), x.tanh())
    assert dict.__getitem__(ACTIVATIONS, "tanh") is nn.Tanh


def test_state_that_was_computed_before_the_call_is_refused_where_gradients_are_asked_for(tmp_path):
    module = nn.Linear(3, 3)
    module.doubled = module.weight * 2
    module.forward = lambda x: x @ module.doubled
    with pytest.raises(aotexport.ExportFailed, match="`doubled` was computed from other tensors before the call"):
        aotexport.export(module, (torch.randn(2, 3),), output=tmp_path / "bundle", verify=False)
    aotexport.export(module, (torch.randn(2, 3),), output=tmp_path / "bundle", programs=("infer",))


def test_gradients_between_buffers_of_one_memory_are_refused(tmp_path, load):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))
            self.register_buffer("rows", torch.ones(2, 3))
            self.register_buffer("row", self.rows[0])
            self.scale = lambda: self.weight

        def forward(self, x):
            self.rows.mul_(self.scale())
            return self.row * x * self.weight

    net, x = Net(), torch.randn(3)
    with pytest.raises(
        aotexport.ExportFailed, match="writes values that require grad to `rows`, and uses `row`, which"
    ):
        aotexport.export(net, (x,), output=tmp_path / "bundle", verify=False)
    net.scale = lambda: 2.0
    torch.testing.assert_close(load(net, x, verify=True)(x), copy.deepcopy(net)(x))
