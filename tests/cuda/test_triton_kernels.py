"""Kernels that users wrote: in lowered graphs, beside portable graphs, and where they are refused."""

import pytest
import torch
import triton
import triton.language as tl
from torch.library import triton_op, wrap_triton

import aotexport
import aotexport_runtime
from tests.cases.triton_kernels import NAMESPACE, OfTriton, scaled, scaling
from tests.cuda.lowered import launches, lowered, operators

BATCH = torch.export.Dim("batch", min=2, max=64)


def launched(program, file):
    return [node.op.removeprefix("kernel::").rpartition("_")[0] for node in launches(program, file)]


def test_kernels_are_launched_in_both_directions():
    program = lowered(OfTriton(), torch.randn(3, 4), program="train")
    assert {"scaling", "multiplying"} <= set(launched(program, "forward.json"))
    assert {"scaling", "multiplying"} <= set(launched(program, "backward.json"))
    assert not any(op.startswith(NAMESPACE) for file in program.graphs for op in operators(program, file))


def test_grid_of_a_dynamic_size_is_an_argument_of_the_launch():
    program = lowered(OfTriton(), torch.randn(3, 4), dynamic_shapes=({0: BATCH},))
    (node,) = (node for node in launches(program) if node.op.startswith("kernel::scaling"))
    assert "floordiv" in repr(node.kwargs["_grid_0"])
    assert (node.kwargs["_grid_1"], node.kwargs["_grid_2"]) == (1, 1)


def test_portable_graphs_call_the_operators(tmp_path):
    model, x = OfTriton(), torch.randn(3, 4)
    report = aotexport.export(model, (x,), output=tmp_path / "bundle")
    assert [program.record.refusals for program in report.programs] == [(), ()]
    loaded = aotexport_runtime.load(tmp_path / "bundle", target="portable", operator_namespaces=[NAMESPACE])
    found = []
    for module in (loaded, model):
        result = module(x)
        found.append((result, *torch.autograd.grad(result.sum(), list(module.parameters()))))
    torch.testing.assert_close(*found)


def test_operator_without_anything_for_cpus_is_refused_by_name(tmp_path):
    @triton_op(f"{NAMESPACE}::only_on_gpus", mutates_args={})
    def only_on_gpus(x: torch.Tensor) -> torch.Tensor:
        result = torch.empty_like(x)
        wrap_triton(scaling)[(1,)](x, result, x.numel(), 2.0, BLOCK=32)
        return result

    with pytest.raises(aotexport.ExportFailed) as caught:
        aotexport.export(lambda x: only_on_gpus(x), (torch.randn(4),), output=tmp_path / "bundle")
    assert str(caught.value) == (
        f"operator `{NAMESPACE}::only_on_gpus` runs Triton kernels, which CPUs cannot, and what the bundle computes is "
        "recorded on a CPU. Register what CPUs run in its place, `operator.register_kernel('cpu')(function)`"
    )


@triton.jit
def shifting(source, offsets, target, count, shift, negate, BLOCK: tl.constexpr):  # noqa: N803
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(source + index, mask=index < count) + shift
    if offsets is not None:
        value += tl.load(offsets + index, mask=index < count)
    tl.store(target + index, tl.where(negate, -value, value), mask=index < count)


def test_truths_floats_and_none_are_arguments_too():
    @triton_op(f"{NAMESPACE}::shifted", mutates_args={})
    def shifted(x: torch.Tensor, negate: bool) -> torch.Tensor:
        result = torch.empty_like(x)
        wrap_triton(shifting)[(1,)](x, None, result, x.numel(), 0.5, negate, BLOCK=32)
        return result

    shifted.register_kernel("cpu")(lambda x, negate: -(x + 0.5) if negate else x + 0.5)
    program = lowered(lambda x: torch.ops.aotexport_triton.shifted(x.relu(), True), torch.randn(8))
    (kernel,) = (kernel for kernel in program.kernels if kernel.name.startswith("shifting"))
    (node,) = (node for node in launches(program) if node.op.startswith("kernel::shifting"))
    fixed = kernel.candidates[0].constants
    assert fixed["offsets"] is None
    assert node.kwargs["shift"] == 0.5
    assert node.kwargs.get("negate", fixed.get("negate")) is True


def test_kernels_given_views_begin_where_the_views_do():
    program = lowered(lambda x: scaled(x[1:], 2.0) + 1, torch.randn(5, 4))
    assert "scaling" in launched(program, "forward.json")
