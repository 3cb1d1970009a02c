"""Fused attention of processors on GPUs: what stands in computes the same, laid out as by the operator."""

import pytest
import torch

from aotexport_runtime.execution.attention import replacement
from aotexport_runtime.execution.codegen import Environment

aten = torch.ops.aten
OF_CPUS = "aten::_scaled_dot_product_flash_attention_for_cpu"


def stand_in(name):
    found = replacement(f"{name}.default", "cuda")
    assert found is not None
    return found


def operands(dtype=torch.float64, shared=3):
    torch.manual_seed(0)
    query = torch.randn(2, 5, 3, 8, dtype=dtype).transpose(1, 2)
    return query, *(torch.randn(2, shared, 9, 8, dtype=dtype) for _ in range(2))


@pytest.mark.parametrize(
    ("dtype", "masked", "is_causal", "shared"),
    [(torch.float32, True, False, 3), (torch.bfloat16, False, True, 3), (torch.float32, False, False, 1)],
)
def test_attention_of_cpus_on_gpus_computes_the_same(dtype, masked, is_causal, shared):
    query, key, value = operands(dtype, shared)
    options = {"attn_mask": torch.randn(2, 1, 5, 9, dtype=dtype) if masked else None, "scale": 0.3}
    results = stand_in(OF_CPUS)(query, key, value, 0.0, is_causal, **options)
    expected = aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, 0.0, is_causal, **options)
    torch.testing.assert_close(results[0], expected[0])
    assert results[0].stride() == expected[0].stride()
    grad = torch.randn_like(expected[0])
    rest = (0.0, is_causal)
    gradients = stand_in(f"{OF_CPUS}_backward")(grad, query, key, value, *results, *rest, **options)
    others = aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad, query, key, value, *expected, *rest, **options
    )
    for gradient, other in zip(gradients, others, strict=True):
        torch.testing.assert_close(gradient, other)
        assert gradient.stride() == other.stride()


@pytest.mark.parametrize(("device", "moved"), [(None, False), ("cpu", False), ("cuda:0", True)])
def test_operator_is_exchanged_where_the_bundle_is_loaded_to_another_kind_of_device(device, moved):
    environment = Environment(device=None if device is None else torch.device(device))
    assert (environment.replacement(f"{OF_CPUS}.default") is not None) is moved
