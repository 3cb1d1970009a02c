"""Bundles with tensor subclasses as their users meet them: classes given at load, calls, training, saving."""

import copy
import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize
from torch.testing._internal.two_tensor import TwoTensor

import aotexport
import aotexport_runtime
from aotexport_runtime import CallInvalid, NotSupported
from aotexport_runtime.values.subclasses import parts
from tests import models
from tests.cases.subclasses import TYPES, ScaledInt8Weight, two
from tests.refusals import refusal
from tests.scaled import Block, FastInt8, Recipe, ScaledInt8


class Model(nn.Module):
    calls: torch.Tensor

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 3)
        self.linear.weight = nn.Parameter(two(3, 4))
        self.tied = self.linear.weight
        self.register_buffer("calls", two(1))

    def forward(self, x):
        self.calls.add_(1)
        return torch.tanh(self.linear(x))


@pytest.fixture(scope="module")
def example():
    torch.manual_seed(0)
    return Model(), two(2, 4)


@pytest.fixture(scope="module")
def bundle(example, new_bundle):
    return new_bundle(*example)


@pytest.fixture(params=["portable", "autograd"])
def loaded(request, bundle):
    return aotexport_runtime.load(bundle, tensor_types=TYPES, target=request.param)


def same(a, b):
    assert type(a) is type(b)
    for x, y in zip(parts(a), parts(b), strict=True):
        torch.testing.assert_close(x, y)


def test_load_without_the_classes_names_them_and_what_to_import(bundle):
    assert refusal(NotSupported, aotexport_runtime.load, bundle) == (
        "the bundle holds tensors of `torch.testing._internal.two_tensor:TwoTensor`, which the caller did not give. "
        "Write `from torch.testing._internal.two_tensor import TwoTensor`, and pass `tensor_types=[TwoTensor]` to "
        "`load`"
    )


def test_class_of_another_name_is_given_by_the_name_in_the_bundle(bundle, example):
    moved = {"torch.testing._internal.two_tensor:TwoTensor": TwoTensor}
    assert type(aotexport_runtime.load(bundle, tensor_types=moved).linear.weight) is TwoTensor


def test_state_is_of_the_class_with_names_ties_and_parameters(loaded, example):
    state = loaded.state_dict()
    assert list(state) == list(example[0].state_dict())
    assert isinstance(loaded.linear.weight, nn.Parameter)
    assert loaded.tied is loaded.linear.weight
    same(state["linear.weight"], example[0].linear.weight.detach())


def test_training_by_an_optimizer_does_what_eager_does(loaded, example):
    model, x = copy.deepcopy(example[0]), example[1]
    for module in (model.train(), loaded.train()):
        optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            module(x).sum().backward()
            optimizer.step()
    assert isinstance(loaded.linear.weight.grad, TwoTensor)
    same(loaded.linear.weight.detach(), model.linear.weight.detach())
    same(loaded.calls, model.calls)


def test_saved_weights_are_loaded_again_and_the_self_test_holds(loaded, example, tmp_path):
    with torch.no_grad():
        loaded.linear.weight.mul_(2)
    aotexport_runtime.save(loaded, tmp_path / "tuned")
    again = aotexport_runtime.load(tmp_path / "tuned", tensor_types=TYPES)
    same(again.linear.weight.detach(), example[0].linear.weight.detach() * 2)
    assert aotexport_runtime.selftest(tmp_path / "tuned", tensor_types=TYPES)


def test_second_derivative_is_that_of_eager(loaded, example):
    def second(module):
        x = example[1].detach().requires_grad_()
        (first,) = torch.autograd.grad(module(x).sum(), x, create_graph=True)
        return torch.autograd.grad(first.sum(), x)[0]

    same(second(loaded.train()), second(copy.deepcopy(example[0]).train()))


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: torch.zeros(2, 4), "expected a `TwoTensor`, as at capture, got a `Tensor`"),
        (
            lambda: TwoTensor(two(2, 4), two(2, 4)),
            "inner tensor `a`: expected a plain tensor, as at capture, got a `TwoTensor`",
        ),
        (lambda: two(3, 4), "expected to be made of float32[2, 4], got float32[3, 4]"),
    ],
)
def test_argument_unlike_the_example_is_refused_by_name(loaded, make, reason):
    with pytest.raises(CallInvalid) as error:
        loaded(make())
    assert error.value.violations == [f"`x`: {reason}"]


def test_argument_of_another_context_is_refused_by_name(tmp_path):
    def function(x):
        return x + 1

    example = ScaledInt8.of(torch.ones(2, 2))
    aotexport.export(function, (example,), output=tmp_path / "b", verify=False)
    loaded = aotexport_runtime.load(tmp_path / "b", tensor_types=TYPES)
    with pytest.raises(NotSupported, match=r"`, and add Block, Recipe, Rounding to the `tensor_types` of `load`$"):
        aotexport_runtime.load(tmp_path / "b", tensor_types=[ScaledInt8])
    with pytest.raises(CallInvalid) as error:
        loaded(ScaledInt8.of(torch.ones(2, 2), Recipe(block=Block(2, 2))))
    assert error.value.violations == [
        f"`x`: expected a `ScaledInt8` with {Recipe()!r}, as at capture, got one with {Recipe(block=Block(2, 2))!r}"
    ]


class Adapter(nn.Module):
    """A frozen quantised weight beside a trained one."""

    def __init__(self):
        super().__init__()
        self.frozen = nn.Linear(4, 3)
        self.frozen.weight = nn.Parameter(ScaledInt8.of(torch.randn(3, 4)), requires_grad=False)
        self.trained = nn.Linear(4, 3)

    def forward(self, x):
        return self.frozen(x).sigmoid() * self.trained(x)


def test_quantised_weight_beside_trained_ones_runs_the_joint_graph_twice_differentiably(tmp_path):
    torch.manual_seed(0)
    model, x = Adapter(), torch.randn(2, 4, requires_grad=True)
    report = aotexport.export(model, (x,), output=tmp_path / "b", programs="train", verify=False)
    loaded = aotexport_runtime.load(tmp_path / "b", tensor_types=TYPES, target="portable").train()
    assert report.programs[0].record.refusals == ()
    for module in (model, loaded):
        module(x).sum().backward()
    same(loaded.trained.weight.grad, model.trained.weight.grad)
    assert loaded.frozen.weight.grad is None

    def penalty(module):
        (gradient,) = torch.autograd.grad(module(x).sum(), x, create_graph=True)
        return torch.autograd.grad(gradient.square().sum(), (x, module.trained.weight))

    torch.testing.assert_close(penalty(loaded), penalty(model))


class Made(nn.Module):
    """Makes a quantised weight of its plain parts in every call, as `unwrap_tensor_subclass` of torchao does."""

    def right_inverse(self, weight):
        return weight.integers, weight.scale

    def forward(self, integers, scale):
        return FastInt8(integers, scale, Recipe())


def test_quantised_weight_that_calls_make_of_its_parts_needs_no_class_at_load(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh())
    parts_only = copy.deepcopy(model).requires_grad_(False)
    weight = FastInt8.of(model.get_parameter("0.weight").detach())
    for each in (model, parts_only):
        each[0].weight = nn.Parameter(weight, requires_grad=False)
    parametrize.register_parametrization(parts_only[0], "weight", Made(), unsafe=True)
    batch = torch.export.Dim("batch", max=8)
    options = {"programs": "infer", "dynamic_shapes": {"input": {0: batch}}, "verify": False}
    aotexport.export(parts_only, (torch.randn(2, 4),), output=tmp_path / "b", **options)
    loaded, x = aotexport_runtime.load(tmp_path / "b").eval(), torch.randn(5, 4)
    assert torch.equal(loaded(x), model(x))
    assert loaded.get_parameter("0.parametrizations.weight.original0").dtype is torch.int8


@pytest.mark.slow
def test_distributed_tensors_on_a_mesh_of_one_process_are_exported_and_trained(tmp_path):
    """Process groups are of a process: all in one of its own, by both engines, beside eager."""
    command = [sys.executable, "-W", "ignore", "-m", "tests.distributed_models", str(tmp_path)]
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    assert process.stdout == "done\n", process.stderr[-3000:]


class Named(torch.Tensor):
    """A class of tensors with nothing of its own inside."""


def test_output_has_the_class_that_a_call_brings(tmp_path):
    path = aotexport.export(lambda x: x * 2, (torch.randn(3).as_subclass(Named),), output=tmp_path / "bundle").path
    assert type(aotexport_runtime.load(path)(torch.randn(3).as_subclass(Named))) is Named


def jagged():
    return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)


NESTED = "`x` is a nested tensor, which a bundle cannot hold. Pass its values and offsets, or pad it"
MASKED = (
    "`x` is a `MaskedTensor`, a class of tensors without `__tensor_flatten__`, which a bundle cannot hold. Give the "
    "class that method, or pass the tensors that it is made of"
)
QUANTIZED = "`x` is a quantized tensor, which a bundle cannot hold. Pass its integers and scales, or `dequantize()` it"
SPARSE = "`x` has layout torch.sparse_coo; a bundle holds strided tensors. Convert it first (`to_dense()`)"


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (jagged, NESTED),
        (lambda: torch.masked.masked_tensor(torch.ones(2), torch.tensor([True, False])), MASKED),
        (lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8), QUANTIZED),
        (lambda: torch.eye(2).to_sparse(), SPARSE),
    ],
    ids=["nested", "masked", "quantized", "sparse"],
)
def test_tensor_of_a_kind_that_no_bundle_holds_is_refused_by_name(make, message, tmp_path):
    def double(x):
        return x * 2

    holder = models.module(lambda self, y: self.x * y, x=make())
    for model, args in ((double, (make(),)), (holder, (torch.ones(2),))):
        said = refusal(aotexport.ExportFailed, aotexport.export, model, args, output=tmp_path / "b", verify=False)
        assert said == message


@pytest.mark.parametrize(
    ("function", "name", "way_out"),
    [
        (
            lambda x: torch.nested.nested_tensor([x, x], layout=torch.jagged).values(),
            "torch.nested.nested_tensor",
            "Compute on values and offsets, or pad",
        ),
        (lambda x: torch.masked.masked_tensor(x, x > 0).sum(), "MaskedTensor", "Keep values and mask as two tensors"),
    ],
    ids=["nested", "masked"],
)
def test_model_that_makes_tensors_of_such_a_kind_is_refused_by_name(function, name, way_out, tmp_path):
    with pytest.raises(aotexport.ExportFailed) as error:
        aotexport.export(function, (torch.ones(2),), output=tmp_path / "b", verify=False)
    where, _, message = str(error.value).partition(": in <lambda>: ")
    assert where.startswith(__file__)
    assert message == f"the model calls `{name}`, which a bundle cannot hold. {way_out}"


def test_frozen_weight_of_a_class_that_is_thawed_gets_eagers_gradient(tmp_path):
    net, x = ScaledInt8Weight(), torch.ones(3, 4)
    aotexport.export(net, (x,), output=tmp_path / "bundle", verify=False)
    targets = ("auto", "portable", "autograd")
    gradients = []
    for model in (net, *(aotexport_runtime.load(tmp_path / "bundle", target=t, tensor_types=TYPES) for t in targets)):
        model.get_parameter("linear.weight").requires_grad_()
        model(x).sum().backward()
        gradients.append(model.get_parameter("linear.weight").grad)
    for found in gradients[1:]:
        torch.testing.assert_close(found, gradients[0])


def test_output_of_a_class_that_only_the_code_makes_is_refused(tmp_path):
    def named(x):
        return {"a": (x * 2).as_subclass(Named)}

    with pytest.raises(aotexport.ExportFailed) as caught:
        aotexport.export(named, (torch.randn(3),), output=tmp_path / "bundle", verify=False)
    assert str(caught.value) == (
        "output['a'] is a `Named`, a class of tensors that a bundle cannot hold. Return a plain tensor "
        "(`as_subclass(torch.Tensor)`)"
    )
