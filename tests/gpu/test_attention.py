"""Fused attention of CPUs on a GPU, by torch's own kernels: forward and backward equal the CPU's."""

import pytest
import torch

from aotexport.lower.cuda.attention import MOVED
from aotexport_runtime.execution.attention import replacement

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    # Of torch, of any release.
    pytest.mark.filterwarnings("default"),
]

FORWARD = "aten::_scaled_dot_product_flash_attention_for_cpu.default"
BACKWARD = "aten::_scaled_dot_product_flash_attention_for_cpu_backward.default"

CASES = {
    "plain": (torch.float32, 16, 33, 33, 4, False, False),
    "causal": (torch.float32, 16, 33, 33, 4, True, False),
    "not_square": (torch.float16, 16, 33, 17, 4, True, False),
    "odd_head": (torch.float32, 7, 33, 33, 4, False, False),
    "masked": (torch.float32, 16, 33, 17, 4, False, True),
    "half": (torch.float16, 64, 33, 33, 4, True, False),
    "half_odd_head": (torch.bfloat16, 30, 33, 33, 4, False, False),
    "half_masked": (torch.bfloat16, 32, 33, 17, 4, False, True),
    "half_wide_head": (torch.float16, 224, 33, 33, 4, False, False),
    "shared_heads": (torch.float32, 16, 33, 33, 2, True, False),
    "half_shared_heads": (torch.float16, 32, 33, 33, 2, True, False),
    "double": (torch.float64, 16, 33, 33, 4, True, False),
}


@pytest.mark.parametrize("found", [MOVED.get, lambda name: replacement(name, "cuda")], ids=["kernels", "portable"])
@pytest.mark.parametrize("name", CASES)
def test_attention_of_cpus_on_a_gpu_equals_the_cpus(name, found):
    dtype, width, rows, columns, shared, is_causal, masked = CASES[name]
    torch.manual_seed(0)
    query = torch.randn(2, rows, 4, width, dtype=dtype).transpose(1, 2)
    key, value = (torch.randn(2, shared, columns, width, dtype=dtype) for _ in range(2))
    mask = torch.randn(2, 1, rows, columns, dtype=dtype) if masked else None
    grad = torch.randn(query.shape, dtype=dtype)
    tolerance = {"rtol": 2e-2, "atol": 2e-2} if dtype.itemsize == 2 else {"rtol": 2e-3, "atol": 2e-3}

    def run(device, forward, backward):
        operands = [tensor.to(device) for tensor in (query, key, value)]
        added = None if mask is None else mask.to(device)
        out, statistics = forward(*operands, 0.0, is_causal, attn_mask=added)
        gradients = backward(grad.to(device), *operands, out, statistics, 0.0, is_causal, attn_mask=added)
        return [tensor.cpu() for tensor in (out, *gradients)]

    aten = torch.ops.aten
    expected = run(
        "cpu",
        aten._scaled_dot_product_flash_attention_for_cpu,
        aten._scaled_dot_product_flash_attention_for_cpu_backward,
    )
    torch.testing.assert_close(run("cuda", found(FORWARD), found(BACKWARD)), expected, **tolerance)
