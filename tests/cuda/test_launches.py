"""Kernels that models launch themselves: recorded, compiled, and refused by name where that cannot be."""

import pytest
import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

import aotexport
import aotexport_runtime
from aotexport.lower.cuda import compile as compilation
from tests.cases.triton_kernels import Launching, scaling
from tests.cuda.lowered import launches, lowered
from tests.refusals import refusal

BATCH = torch.export.Dim("batch", min=2, max=64)
WAY_OUT = (
    "make it an operator (torch.library.triton_op, torch.library.wrap_triton) and register what CPUs run in its "
    "place, `operator.register_kernel('cpu')(function)`"
)


@pytest.fixture(autouse=True)
def uncompiled(monkeypatch):
    monkeypatch.setattr(compilation, "compile_kernels", lambda *args, **kwargs: compilation.Compiled({}, {}))


def exported(function, output, target="cuda:sm_80", **options):
    return aotexport.export(function, (torch.randn(4),), output=output / "bundle", targets=(target,), **options)


def scaled(x):
    result = torch.empty_like(x)
    scaling[(1,)](x, result, x.numel(), 2.0, BLOCK=32)
    return result


def test_launches_are_lowered_with_every_configuration():
    program = lowered(Launching(), torch.randn(3, 4), dynamic_shapes=({0: BATCH},))
    launched = [node.op.removeprefix("kernel::").rpartition("_")[0] for node in launches(program)]
    assert [name for name in launched if not name.startswith("triton_")] == ["scaling", "multiplying", "counting"]
    candidates = {kernel.name.rpartition("_")[0]: kernel.candidates for kernel in program.kernels}
    assert [candidate.constants["BLOCK"] for candidate in candidates["multiplying"]] == [16, 64]


@triton.jit
def moving(source, target, count, offset, BLOCK: tl.constexpr):  # noqa: N803
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(target + index, tl.load(source + index, mask=index < count) + offset, mask=index < count)


@pytest.mark.parametrize(
    ("offset", "bits"), [(-(2**31), "i32"), (-(2**31) - 1, "i64"), (2**31 - 1, "i32"), (2**31, "i64")]
)
def test_integers_are_passed_in_the_bits_that_they_need(offset, bits):
    def moved(x):
        result = torch.empty_like(x)
        moving[(1,)](x, result, x.numel(), offset, BLOCK=32)
        return result

    (kernel,) = (k for k in lowered(moved, torch.arange(8)).kernels if k.name.startswith("moving"))
    assert kernel.signature["offset"] == bits


def test_heuristics_below_tuning_are_asked_per_configuration():
    @triton.autotune(configs=[triton.Config({"BLOCK": 8}), triton.Config({"BLOCK": 16})], key=["count"])
    @triton.heuristics({"EVEN": lambda args: args["count"] % args["BLOCK"] == 0})
    @triton.jit
    def tuned(source, target, count, BLOCK: tl.constexpr, EVEN: tl.constexpr):  # noqa: N803
        index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        value = tl.load(source + index) if EVEN else tl.load(source + index, mask=index < count)
        tl.store(target + index, value, mask=index < count)

    def copied(x):
        result = torch.empty_like(x)
        tuned[lambda meta: (triton.cdiv(x.numel(), meta["BLOCK"]),)](x, result, x.numel())
        return result

    (kernel,) = lowered(copied, torch.randn(8)).kernels
    assert [(c.constants["BLOCK"], c.constants["EVEN"]) for c in kernel.candidates] == [(8, True), (16, False)]


def test_arguments_that_tuning_zeroes_and_restores_are_taken():
    configs = [triton.Config({"BLOCK": 8}), triton.Config({"BLOCK": 16})]

    @triton.autotune(configs=configs, key=[], reset_to_zero=["target"], restore_value=["source"])
    @triton.jit
    def adding(source, target, count, BLOCK: tl.constexpr):  # noqa: N803
        index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        tl.atomic_add(target + index, tl.load(source + index, mask=index < count), mask=index < count)

    def added(x):
        result = torch.zeros_like(x)
        adding[lambda meta: (triton.cdiv(x.numel(), meta["BLOCK"]),)](x, result, x.numel())
        return result

    assert [len(kernel.candidates) for kernel in lowered(added, torch.randn(8)).kernels if "adding" in kernel.name] == [
        2
    ]


def test_bundle_says_that_it_was_not_verified_and_what_runs_it(tmp_path):
    run = triton.runtime.jit.JITFunction.run
    report = exported(scaled, tmp_path)
    assert triton.runtime.jit.JITFunction.run is run
    assert list(map(str, report.notes)) == [
        "program infer is not verified: nothing on this machine runs the Triton kernel `scaling`, which the model "
        "launches itself"
    ]
    assert refusal(aotexport_runtime.NotSupported, aotexport_runtime.load(tmp_path / "bundle"), torch.randn(4)) == (
        "the model launches the Triton kernel `scaling`, and this form of its program cannot: the bundle's compiled "
        "kernels do, on a GPU that they fit (`device='cuda', trust='native'`), for calls as at the export"
    )


@pytest.mark.parametrize(
    ("function", "options", "reason"),
    [
        (
            scaled,
            {"target": "portable"},
            f"itself, which only kernels that are compiled for NVIDIA GPUs can do: export with `--target cuda`, or "
            f"{WAY_OUT}",
        ),
        (
            scaled,
            {"programs": "train"},
            "itself, and autograd knows no gradient of it. Leave out programs with gradients "
            f"(`programs=('infer',)`), or {WAY_OUT} and its gradient, `operator.register_autograd(function)`",
        ),
        (
            lambda x: torch.cond(x.sum() > 0, lambda x: x.sin(), lambda x: x.cos(), (scaled(x),)),
            {},
            "itself, and program infer has no kernels: it calls graphs of their own, by `cond`",
        ),
    ],
    ids=["no_kernels", "gradients", "branch"],
)
def test_launch_that_no_form_of_the_program_can_do_is_refused(function, options, reason, tmp_path):
    said = refusal(aotexport.ExportFailed, exported, function, tmp_path, **options)
    assert said == f"the model launches the Triton kernel `scaling` {reason}"


@triton.autotune(configs=[triton.Config({"BLOCK": 16}, pre_hook=lambda args: None)], key=["count"])
@triton.jit
def hooked(source, target, count, BLOCK: tl.constexpr):  # noqa: N803
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(target + index, tl.load(source + index, mask=index < count), mask=index < count)


def _refused(kernel):
    def call(x):
        result = torch.empty_like(x)
        kernel[(1,)](x, result, x.numel())
        return result

    return call


def described(x):
    result = torch.empty_like(x)
    hooked.fn[(1,)](TensorDescriptor.from_tensor(x, [4]), result, x.numel(), BLOCK=16)
    return result


HOOK = "pre_hook and post_hook are not supported in triton.Autotune or triton.Config"


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (_refused(hooked), f"in call: the Triton kernel `hooked`: {HOOK}"),
        (
            described,
            "in described: the Triton kernel `hooked` takes a tensor descriptor, which a bundle cannot hold. Pass the "
            "tensor and its sizes, and make pointers in the kernel",
        ),
    ],
    ids=["hook", "descriptor"],
)
def test_kernel_that_cannot_be_compiled_along_is_refused_by_name(function, reason, tmp_path):
    with pytest.raises(aotexport.ExportFailed) as caught:
        exported(function, tmp_path)
    assert reason in str(caught.value)
    assert f"{__file__}:" in str(caught.value)
