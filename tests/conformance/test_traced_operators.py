"""Custom operators written in Python: traced through by default, with their gradients and writes, or kept by name."""

import pytest
import torch
import torch.ao.quantization.fx._decomposed  # the operators of models that PT2E quantises
from torch import nn

import aotexport
import aotexport_runtime
from aotexport.write.files import custom_operators
from tests.cases import operators
from tests.cases.mutations import leaf
from tests.forked import ForkedProcess

NAMESPACE = "aotexport_traced"
LIBRARY = torch.library.Library(NAMESPACE, "DEF")


def _define(name, function, key):
    LIBRARY.define(f"{name}(Tensor x) -> Tensor")
    LIBRARY.impl(name, function, key)
    if "Implicit" not in key:
        torch.library.register_fake(f"{NAMESPACE}::{name}", torch.empty_like, lib=LIBRARY)


_define("composite", lambda x: (x * 2).sin(), "CompositeImplicitAutograd")
_define("explicit", lambda x: x.cos(), "CompositeExplicitAutograd")
_define("branching", lambda x: x * 2 if x.sum() > 0 else x * 3, "CompositeExplicitAutograd")


@torch.library.custom_op(f"{NAMESPACE}::without_backward", mutates_args=())
def without_backward(x: torch.Tensor) -> torch.Tensor:
    return x.exp()


@torch.library.custom_op(f"{NAMESPACE}::following", mutates_args=())
def following(x: torch.Tensor) -> torch.Tensor:
    return x * 2 if x.sum() > 0 else x * 3


for _operator in (without_backward, following):
    _operator.register_fake(torch.empty_like)
following.register_autograd(lambda ctx, grad: grad * 2)
TRACED = torch.ops.aotexport_traced


@torch.library.triton_op(f"{NAMESPACE}::by_device", mutates_args=())
def by_device(x: torch.Tensor) -> torch.Tensor:
    raise NotImplementedError


def _on_cpu(x):
    return (x * 2).sin() if x.shape[0] > 1 else x.sin()


LIBRARY.impl("by_device", _on_cpu, "CPU")
LIBRARY.impl("by_device", _on_cpu, "AutogradCPU")


class Quantised(nn.Module):
    """Layers as PT2E leaves them: integers whose values gradients do not reach, between operators of its own."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Buffer(torch.randint(-128, 127, (4, 3), dtype=torch.int8))
        self.scales, self.zeros = nn.Buffer(torch.rand(4)), nn.Buffer(torch.zeros(4, dtype=torch.int64))
        self.bias = nn.Parameter(torch.randn(4))

    def forward(self, x):
        ops = torch.ops.quantized_decomposed
        weight = ops.dequantize_per_channel(self.weight, self.scales, self.zeros, 0, -128, 127, torch.int8)
        y = nn.functional.linear(x, weight, self.bias)
        whole = ops.quantize_per_tensor(y, 0.05, 3, 0, 255, torch.uint8)
        return ops.dequantize_per_tensor(whole, 0.05, 3, 0, 255, torch.uint8)


def test_model_that_pt2e_quantised_needs_no_operators_of_torch_ao(tmp_path):
    report = aotexport.export(Quantised().eval(), (torch.randn(5, 3),), output=tmp_path / "b", programs="infer")
    assert custom_operators(report.programs) == set()


@pytest.mark.parametrize("key", ["CompositeImplicitAutograd", "CompositeExplicitAutograd", "CPU"])
def test_kernel_that_reads_the_layout_holds_calls_to_it(key, load):
    name = f"by_layout_{key.lower()}"
    _define(name, lambda x: x * (2 if x.is_contiguous() else 3), key)
    module = load(lambda x: getattr(TRACED, name)(x), torch.ones(3, 4), target="auto")
    assert module(torch.ones(3, 4)).unique() == 2
    with pytest.raises(aotexport_runtime.CallInvalid, match="strides"):
        module(torch.ones(4, 3).T)


@pytest.mark.parametrize(
    ("function", "args"),
    [
        (operators.operator_with_gradients, lambda: (leaf(3, 4),)),
        (operators.operator_that_writes_to_views_and_lists, lambda: (torch.randn(3, 4), torch.randn(4))),
        (operators.OperatorThatWritesToABuffer(), lambda: (torch.randn(3, 4),)),
        (operators.operator_that_writes_in_a_backward, lambda: (leaf(3, 4), torch.randn(3, 4))),
        (lambda x: TRACED.composite(x), lambda: (leaf(3),)),
        (lambda x: by_device(x) * x, lambda: (leaf(3),)),
    ],
    ids=["gradients", "views", "buffer", "backward", "composite", "by device"],
)
def test_operator_is_traced_through_and_equals_eager(function, args, tmp_path):
    report = aotexport.export(function, args(), output=tmp_path / "b", verify=False)
    assert custom_operators(report.programs) == set()
    assert report.notes == []
    with ForkedProcess() as without_the_library:
        done = without_the_library.run(["selftest", str(tmp_path / "b")], timeout_s=60)
    assert done.returncode == 0, done.stderr


def test_operator_without_a_backward_raises_as_eager_does(load):
    module = load(lambda x: without_backward(x) + x, torch.ones(3), programs=["infer"], target="auto")
    messages = []
    for function in (module, lambda x: without_backward(x) + x):
        with pytest.raises(RuntimeError) as caught:
            function(torch.ones(3, requires_grad=True)).sum().backward()
        messages.append(str(caught.value))
    assert messages[0] == messages[1]


@pytest.mark.parametrize(
    ("function", "name"),
    [(following, "following"), (TRACED.branching, "branching"), (TRACED.explicit, "explicit")],
    ids=["branches on values", "branches on values, in pieces", "autograd of its own"],
)
def test_operator_that_cannot_be_traced_is_kept_with_a_note(function, name, tmp_path):
    report = aotexport.export(
        lambda x: function(x) * 2, (leaf(3),), output=tmp_path / "b", verify=False, programs=["infer"]
    )
    assert custom_operators(report.programs) == {f"{NAMESPACE}::{name}.default"}
    assert [note.kind for note in report.notes] == ["package"]


@pytest.mark.parametrize("kept", [operators.NAMESPACE, f"{operators.NAMESPACE}::cubed"])
def test_operator_that_is_asked_for_is_kept(kept, tmp_path):
    report = aotexport.export(
        operators.operator_with_gradients, (leaf(3),), output=tmp_path / "b", verify=False, keep_operators=[kept]
    )
    assert custom_operators(report.programs) == {f"{operators.NAMESPACE}::cubed.default"}


def test_operator_that_code_calls_only_while_it_is_traced_is_not_needed(tmp_path):
    def call(x):
        return TRACED.following(x) if torch.compiler.is_compiling() else x * 2

    x = leaf(3, 4)
    report = aotexport.export(call, (x,), output=tmp_path / "bundle", verify=False)
    assert custom_operators(report.programs) == set()
    assert torch.equal(aotexport_runtime.load(tmp_path / "bundle")(x), call(x))
