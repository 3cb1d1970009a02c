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


def test_dropout_that_processors_do_not_fuse_is_refused():
    with pytest.raises(ValueError, match=r"^CPUs have no fused attention with dropout$"):
        stand_in(OF_CPUS)(*operands(), 0.5)


@pytest.mark.parametrize("dropout_p", [0.0, 0.5])
def test_backward_of_dropout_is_given_its_seeds_on_the_host(dropout_p):
    query, key, value = operands()
    seed = torch.ones((), dtype=torch.int64)
    given = []

    def kernel(grad, query, key, value, bias, out, statistics, *rest, scale):
        given.extend(rest)
        return grad, key, value, None

    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl("_scaled_dot_product_efficient_attention_backward", kernel, "CPU")
        found = stand_in("aten::_scaled_dot_product_efficient_attention_backward")
        rest = (None, query, query, seed, seed, dropout_p, [True, True, True, False])
        found(query, query, key, value, *rest, is_causal=True, scale=0.5)
    assert [each.device.type for each in given[:2]] == ["cpu", "cpu"]
    assert given[2:4] == [dropout_p, [True, True, True, False]]


@pytest.mark.parametrize(("device", "moved"), [(None, False), ("cpu", False), ("cuda:0", True)])
def test_operator_is_exchanged_where_the_bundle_is_loaded_to_another_kind_of_device(device, moved):
    environment = Environment(device=None if device is None else torch.device(device))
    assert (environment.replacement(f"{OF_CPUS}.default") is not None) is moved
