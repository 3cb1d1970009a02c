"""Fused attention of one kind of device on another: what stands in computes the same, laid out as by the operator."""

from __future__ import annotations

import math

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: TID251 (results of operators that do not run here)

from aotexport_runtime.execution.attention import replacement
from aotexport_runtime.execution.codegen import Environment

aten = torch.ops.aten
KINDS = ("flash", "efficient", "cudnn")


def named(kind, *, backward=False):
    before, _, after = kind.partition("_")
    name = f"{before}_attention{'_' * bool(after)}{after}{'_backward' * backward}"
    return f"aten::_scaled_dot_product_{name}.default"


def stand_in(kind, device="cpu", *, backward=False):
    found = replacement(named(kind, backward=backward), device)
    assert found is not None
    return found


def operands(dtype=torch.float64, width=8, rows=5, columns=9, heads=3, shared=3):
    torch.manual_seed(0)
    query = torch.randn(2, rows, heads, width, dtype=dtype).transpose(1, 2)
    return query, *(torch.randn(2, shared, columns, width, dtype=dtype) for _ in range(2))


def forward(kind, query, key, value, mask=None, dropout_p=0.0, is_causal=False, **options):
    """Call the forward of a kind of GPUs; return its results and a function that calls its backward."""
    given = () if kind == "flash" else (mask, True)
    results = stand_in(kind)(query, key, value, *given, dropout_p, is_causal, **options)

    def backward(grad):
        taken = (grad, query, key, value)
        if kind == "flash":
            rest = (*results[:6], dropout_p, is_causal, *results[6:8])
        elif kind == "efficient":
            rest = (mask, *results, dropout_p, [True] * 4, is_causal)
        else:
            rest = (*results[:2], *results[6:8], mask, *results[2:6], dropout_p, is_causal)
        return stand_in(kind, backward=True)(*taken, *rest, **options)

    return results, backward


def by_definition(query, key, value, mask, is_causal, scale):
    key, value = (each.repeat_interleave(query.shape[1] // each.shape[1], 1) for each in (key, value))
    scores = query @ key.transpose(-2, -1) * (scale or 1 / math.sqrt(query.shape[-1]))
    if is_causal:
        scores = scores.masked_fill(~torch.ones(scores.shape[-2:], dtype=torch.bool).tril(), -math.inf)
    return (scores if mask is None else scores + mask).softmax(-1) @ value


@pytest.mark.parametrize("scale", [None, 0.3])
@pytest.mark.parametrize("case", ["plain", "causal", "shared_heads", "masked"])
@pytest.mark.parametrize("kind", KINDS)
def test_attention_of_gpus_on_cpus_computes_the_definition_and_its_gradients(kind, case, scale):
    if kind == "flash" and case == "masked":
        pytest.skip("flash attention takes no mask")
    given = [each.requires_grad_() for each in operands(heads=4, shared=2 if case == "shared_heads" else 4)]
    mask = torch.randn(2, 4, 5, 9, dtype=torch.float64, requires_grad=True) if case == "masked" else None
    expected = by_definition(*given, mask, case == "causal", scale)
    grad = torch.randn_like(expected)
    wanted = torch.autograd.grad(
        expected, [*given, *([mask] if mask is not None and kind == "efficient" else [])], grad
    )
    detached = None if mask is None else mask.detach()
    results, backward = forward(
        kind, *(each.detach() for each in given), detached, is_causal=case == "causal", scale=scale
    )
    torch.testing.assert_close(results[0], expected.detach())
    torch.testing.assert_close(tuple(each for each in backward(grad) if each is not None), wanted)


@pytest.mark.parametrize(
    ("dtype", "masked", "is_causal"), [(torch.float32, True, False), (torch.bfloat16, False, True)]
)
def test_attention_of_cpus_on_gpus_computes_the_same(dtype, masked, is_causal):
    query, key, value = operands(dtype)
    options = {"attn_mask": torch.randn(2, 1, 5, 9, dtype=dtype) if masked else None, "scale": 0.3}
    results = stand_in("flash_for_cpu", "cuda")(query, key, value, 0.0, is_causal, **options)
    expected = aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, 0.0, is_causal, **options)
    assert torch.equal(results[0], expected[0])
    grad = torch.randn_like(expected[0])
    rest = (0.0, is_causal)
    gradients = stand_in("flash_for_cpu", "cuda", backward=True)(grad, query, key, value, *results, *rest, **options)
    others = aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad, query, key, value, *expected, *rest, **options
    )
    for gradient, other in zip(gradients, others, strict=True):
        assert torch.equal(gradient, other)
        assert gradient.stride() == other.stride()


def on_cuda(tensor):
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cuda")


@pytest.mark.parametrize("by_rows", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_results_and_gradients_are_laid_out_as_by_the_operator(kind, by_rows):
    given = operands(torch.float16)
    query, key, value = given if by_rows else (each.contiguous() for each in given)
    results, backward = forward(kind, query, key, value, is_causal=True, scale=0.5)
    gradients = backward(torch.randn_like(query))
    taken = (query, key, value)
    with FakeTensorMode():
        mask = () if kind == "flash" else (None, True)
        expected = getattr(aten, f"_scaled_dot_product_{kind}_attention")(
            *map(on_cuda, taken), *mask, 0.0, True, scale=0.5
        )
    assert len(results) == len(expected)
    assert results[0].stride() == expected[0].stride()
    assert [each for each in results if type(each) is int] == [each for each in expected if type(each) is int]
    alike = [each.transpose(1, 2).contiguous().transpose(1, 2) if kind == "efficient" else each for each in taken]
    assert [each.stride() for each in gradients[:3]] == [torch.empty_like(each).stride() for each in alike]


@pytest.mark.parametrize("kind", KINDS)
def test_dropout_drops_the_same_weights_in_both_directions(kind):
    query, key, value = operands()
    torch.manual_seed(3)
    results, backward = forward(kind, query, key, value, dropout_p=0.5)
    grad = torch.randn_like(results[0])
    state = torch.get_rng_state()
    gradients = backward(grad)
    assert torch.equal(torch.get_rng_state(), state)
    # The result is linear in the values, so its gradient gives it back.
    torch.testing.assert_close((gradients[2] * value).sum(), (grad * results[0]).sum())
    torch.manual_seed(3)
    again, _ = forward(kind, query, key, value, dropout_p=0.5)
    assert torch.equal(again[0], results[0])
    other, _ = forward(kind, query, key, value, dropout_p=0.5)
    assert not torch.equal(other[0], results[0])


def test_dropout_that_processors_do_not_fuse_is_refused():
    with pytest.raises(ValueError, match=r"^CPUs have no fused attention with dropout$"):
        stand_in("flash_for_cpu", "cuda")(*operands(), 0.5)


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
        found = stand_in("efficient", "cuda", backward=True)
        rest = (None, query, query, seed, seed, dropout_p, [True, True, True, False])
        found(query, query, key, value, *rest, is_causal=True, scale=0.5)
    assert [each.device.type for each in given[:2]] == ["cpu", "cpu"]
    assert given[2:4] == [dropout_p, [True, True, True, False]]


@pytest.mark.parametrize(("device", "moved"), [(None, False), ("cpu", False), ("cuda:0", True)])
def test_operator_is_exchanged_where_the_bundle_is_loaded_to_another_kind_of_device(device, moved):
    environment = Environment(device=None if device is None else torch.device(device))
    assert (environment.replacement(named("flash_for_cpu")) is not None) is moved
