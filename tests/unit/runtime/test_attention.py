"""Fused attention of one kind of device on another: what stands in computes the same, in the shapes of the operator."""

from __future__ import annotations

import math

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: TID251 (results of operators that do not run here)

from aotexport_runtime.engines.attention import MOVED, on_cpu, replacement
from aotexport_runtime.engines.attention.on_cuda import bias, fitted, fused_kind
from aotexport_runtime.engines.codegen import Environment

aten = torch.ops.aten

FOR_CPU = "aten::_scaled_dot_product_flash_attention_for_cpu.default"
FOR_CPU_BACKWARD = "aten::_scaled_dot_product_flash_attention_for_cpu_backward.default"


@pytest.fixture
def cuda_operators():
    """Give CPUs the operators that CUDA devices have."""
    with torch.library._scoped_library("aten", "IMPL") as library:
        for name, function in MOVED["cpu"].items():
            library.impl(name.removeprefix("aten::").removesuffix(".default"), function, "CPU")
        yield


def operands(dtype=torch.float32, width=8, rows=5, columns=5, batch=2, heads=3):
    torch.manual_seed(0)
    query = torch.randn(batch, rows, heads, width, dtype=dtype).transpose(1, 2)
    return query, *(torch.randn(batch, heads, columns, width, dtype=dtype) for _ in range(2))


def boolean(query, key):
    mask = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool).tril(1)
    return mask


def added(query, key):
    return torch.randn(query.shape[0], 1, query.shape[2], key.shape[2], dtype=query.dtype)


def nothing_at_first(query, key):
    return torch.ones(query.shape[2], key.shape[2], dtype=torch.bool).tril(-1)


def shared(tensors):
    return tensors[0], tensors[1][:, :2], tensors[2][:, :2]


CALLS = {
    "plain": (operands(), None, False),
    "causal": (operands(), None, True),
    "wide": (operands(columns=9), None, True),
    "odd_head": (operands(width=7), None, False),
    "truths": (operands(columns=9), boolean, False),
    "added": (operands(), added, False),
    "added_in_sixteens": (operands(columns=16), added, False),
    "half": (operands(torch.float16), None, True),
    "half_odd_head": (operands(torch.bfloat16, width=5), None, False),
    "half_masked": (operands(torch.bfloat16), added, False),
    "half_wide": (operands(torch.float16, columns=7), None, True),
    "double": (operands(torch.float64), None, True),
    "shared_heads": (shared(operands(heads=4)), None, True),
    "half_shared_heads": (shared(operands(torch.float16, heads=4)), None, True),
    "double_shared_heads": (shared(operands(torch.float64, heads=4)), None, True),
    "rows_without_keys": (operands(), nothing_at_first, False),
    "double_rows_without_keys": (operands(torch.float64), nothing_at_first, False),
}


@pytest.mark.parametrize("scale", [None, 0.3])
@pytest.mark.parametrize("name", CALLS)
def test_operator_of_cpus_on_cuda_computes_the_same(name, scale, cuda_operators):
    (query, key, value), make, is_causal = CALLS[name]
    mask = None if make is None else make(query, key)
    reference = None if mask is None or mask.dtype != torch.bool else mask.new_zeros(mask.shape, dtype=query.dtype)
    reference = mask if reference is None else reference.masked_fill(~mask, -math.inf)
    options = {"scale": scale}
    tolerance = {"rtol": 2e-2, "atol": 2e-2} if query.dtype in (torch.float16, torch.bfloat16) else {}

    out, statistics = MOVED["cuda"][FOR_CPU](query, key, value, 0.0, is_causal, attn_mask=mask, **options)
    expected = aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, 0.0, is_causal, attn_mask=reference, **options
    )
    torch.testing.assert_close(out, expected[0], **tolerance)

    grad = torch.randn_like(expected[0])
    gradients = MOVED["cuda"][FOR_CPU_BACKWARD](
        grad, query, key, value, out, statistics, 0.0, is_causal, attn_mask=mask, **options
    )
    expected = aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad, query, key, value, *expected, 0.0, is_causal, attn_mask=reference, **options
    )
    for gradient, other in zip(gradients, expected, strict=True):
        torch.testing.assert_close(gradient, other, **tolerance)


@pytest.mark.parametrize(
    ("call", "kind"),
    [
        ((*operands(torch.float16), None, True), "flash"),
        ((*operands(torch.bfloat16, width=7), None, False), "flash"),
        ((*operands(torch.float16, columns=9), None, True), "efficient"),
        ((*operands(torch.float16, columns=9), None, False), "flash"),
        ((*operands(torch.float16, width=200), None, False), "efficient"),
        ((*operands(torch.float16), torch.ones(5, 5, dtype=torch.bool), False), "efficient"),
        ((*operands(torch.float16), torch.zeros(5, 5), False), None),
        ((*operands(), None, True), "efficient"),
        ((*operands(torch.float64), None, True), None),
        ((*operands(columns=0), None, False), None),
    ],
)
def test_kernel_is_chosen_as_torch_chooses(call, kind):
    assert fused_kind(*call) == kind


def test_operand_off_the_grid_of_vectors_is_copied():
    wide = torch.randn(2, 3, 5, 9)
    part = wide[..., 1:]
    copy = fitted(part)
    assert copy.stride() == (120, 40, 8, 1)
    assert torch.equal(copy, part)
    assert fitted(copy) is copy


def test_mask_is_expanded_without_memory_and_its_rows_are_aligned():
    query, key, _ = operands(columns=9)
    result = bias(torch.zeros(5, 9), query, key)
    assert result is not None
    assert result.shape == (2, 3, 5, 9)
    assert result.stride() == (0, 0, 16, 1)


def on_cuda(tensor):
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cuda")


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("name", ["flash", "efficient", "cudnn"])
def test_replacement_returns_the_shapes_dtypes_and_layouts_of_the_operator(name, dtype):
    query, key, value = operands(dtype)
    arguments = ((0.5, True, False) if name == "flash" else (None, True, 0.5, True), {"scale": 0.5})
    operator = getattr(aten, f"_scaled_dot_product_{name}_attention")
    results = getattr(on_cpu, name)(query, key, value, *arguments[0], **arguments[1])
    with FakeTensorMode():
        expected = operator(*map(on_cuda, (query, key, value)), *arguments[0], **arguments[1])
    assert len(results) == len(expected)
    for result, other in zip(results, expected, strict=True):
        if not isinstance(result, torch.Tensor):
            assert result == other
            continue
        assert (result.shape, result.dtype) == (other.shape, other.dtype)
        assert name != "efficient" or result.stride() == other.stride()


@pytest.mark.parametrize("name", ["flash", "efficient"])
def test_dropout_drops_the_same_weights_in_both_directions(name):
    query, key, value = operands(torch.float64)
    options = (0.5, False, False) if name == "flash" else (None, True, 0.5, False)
    torch.manual_seed(3)
    results = getattr(on_cpu, name)(query, key, value, *options)
    # The result is linear in the values, so its gradient gives it back.
    grad = torch.randn_like(results[0])
    seeds = results[6:8] if name == "flash" else results[2:4]
    if name == "flash":
        rest = (results[0], results[1], None, None, 5, 5, 0.5, False, *seeds)
        gradients = on_cpu.flash_backward(grad, query, key, value, *rest)
    else:
        rest = (None, results[0], results[1], *seeds, 0.5, [True, True, True, False], False)
        gradients = on_cpu.efficient_backward(grad, query, key, value, *rest)
    torch.testing.assert_close((gradients[2] * value).sum(), (grad * results[0]).sum())
    torch.manual_seed(3)
    again = getattr(on_cpu, name)(query, key, value, *options)
    assert torch.equal(again[0], results[0])


@pytest.mark.parametrize("dropout_p", [0.0, 0.5])
def test_backward_of_dropout_is_given_its_seeds_on_the_host(dropout_p, cuda_operators):
    query, key, value = operands(torch.float64)
    results = on_cpu.efficient(query, key, value, None, True, dropout_p)
    rest = (None, *results, dropout_p, [True, True, True, False])
    found = replacement("aten::_scaled_dot_product_efficient_attention_backward.default", "cuda")
    assert found is not None
    expected = on_cpu.efficient_backward(query, query, key, value, *rest)
    torch.testing.assert_close(found(query, query, key, value, *rest), expected)


def test_gradient_of_an_added_mask_is_that_of_the_definition():
    query, key, value = operands(torch.float64)
    mask = torch.randn(2, 3, 5, 5, dtype=torch.float64, requires_grad=True)
    scores = query @ key.transpose(-2, -1) / math.sqrt(8) + mask
    grad = torch.randn_like(query)
    (expected,) = torch.autograd.grad(scores.softmax(-1) @ value, mask, grad)
    results = on_cpu.efficient(query, key, value, mask.detach(), True)
    rest = (mask.detach(), results[0], results[1], *results[2:4], 0.0, [True] * 4)
    torch.testing.assert_close(on_cpu.efficient_backward(grad, query, key, value, *rest)[3], expected)


@pytest.mark.parametrize("dropout_p", [0.0, 0.5])
def test_attention_of_cudnn_is_that_of_efficient_attention(dropout_p):
    query, key, value = operands(torch.float64)
    mask, grad = torch.randn(2, 3, 5, 5, dtype=torch.float64), torch.randn(2, 3, 5, 8, dtype=torch.float64)
    torch.manual_seed(1)
    expected = on_cpu.efficient(query, key, value, mask, True, dropout_p)
    torch.manual_seed(1)
    results = on_cpu.cudnn(query, key, value, mask, True, dropout_p)
    assert torch.equal(results[0], expected[0])
    rest = (mask, *expected[:4], dropout_p, [True] * 4)
    gradients = on_cpu.efficient_backward(grad, query, key, value, *rest)
    rest = (*results[:2], *results[6:8], mask, *results[2:6], dropout_p, False)
    torch.testing.assert_close(on_cpu.cudnn_backward(grad, query, key, value, *rest), gradients[:3])


def test_heads_that_share_keys_and_values_have_their_gradients_summed():
    query, key, value = operands(torch.float64, heads=4)
    key, value = key[:, :2].requires_grad_(), value[:, :2].requires_grad_()
    whole = (tensor.repeat_interleave(2, 1) for tensor in (key, value))
    out = torch.nn.functional.scaled_dot_product_attention(query, *whole)
    grad = torch.randn_like(out)
    expected = torch.autograd.grad(out, (key, value), grad)
    detached = key.detach(), value.detach()
    results = on_cpu.flash(query, *detached)
    torch.testing.assert_close(results[0], out.detach())
    gradients = on_cpu.flash_backward(grad, query, *detached, *results[:6], 0.0, False, *results[6:8])
    torch.testing.assert_close(gradients[1:], expected)


@pytest.mark.parametrize(("device", "moved"), [(None, False), ("cpu", False), ("cuda:0", True)])
def test_operator_is_exchanged_where_the_bundle_is_loaded_to_another_kind_of_device(device, moved):
    environment = Environment(device=None if device is None else torch.device(device))
    assert (environment.replacement(FOR_CPU) is not None) is moved
