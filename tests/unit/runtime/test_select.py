"""The rules by which engines are chosen, one program at a time: which engine serves, and the reason that is told."""

import types
from typing import Any

import pytest

from aotexport_runtime.engines.candidates import Request
from aotexport_runtime.engines.select import Choice, largest_matmul, select_engine, select_targets, sizes_of
from aotexport_runtime.schema.graph import Graph, GraphInput, Node
from aotexport_runtime.schema.values import TensorMeta

LEVEL = "cpu-x86_64-v3"


def meta(*shape, dtype: Any = "float32"):
    return TensorMeta(dtype=dtype, shape=shape, stride=(shape[-1], 1) if len(shape) == 2 else (1,))


def graph(*operators, inputs=(), of=None):
    of = of or meta(4, 4)
    nodes = [Node(name=f"n{i}", op=f"aten::{op}", args=["x"], meta=of) for i, op in enumerate(operators)]
    return Graph(inputs=(GraphInput(name="x", meta=of), *inputs), nodes=tuple(nodes), outputs=[])


def matmul(rows, depth, columns, dtype="float32"):
    """Return a functional graph of one matmul."""
    inputs = [("x", meta(rows, depth, dtype=dtype)), ("w", meta(depth, columns, dtype=dtype))]
    node = Node(name="y", op="aten::mm.default", args=["x", "w"], meta=meta(rows, columns, dtype=dtype))
    return Graph(inputs=tuple(GraphInput(name=n, meta=m) for n, m in inputs), nodes=(node,), outputs=["y"])


def record(**fields) -> Any:
    return types.SimpleNamespace(**fields)


def chosen(
    forward, functional, request=None, *, differentiable=True, engines=(), compiled=True, refusals=(), **options
):
    """Return the choice for a program of these two graphs, whose bundle has every target."""
    refused = tuple(record(program="train", reason=reason) for reason in refusals)
    program = record(
        name="train",
        grad=True,
        refusals=refused,
        forward=record(file="forward", differentiable=differentiable),
        functional=None if functional is None else record(file="functional"),
    )
    bundle = record(
        graph=lambda name, file: {"forward": forward, "functional": functional}[file],
        compiled=lambda target, name: object() if compiled else None,
        target=lambda name: record(refusals=refused),
    )
    return select_engine(bundle, program, request or Request(), targets=Choice(engines=engines), **options)


SMALL, LARGE = graph("linear.default"), matmul(256, 256, 256)


def test_a_step_is_written_in_place_by_its_forward_graph_or_a_library():
    functional = record(file="functional", mutations=range(4))
    forward = record(file="forward", differentiable=True)
    program = record(name="step", grad=False, inputs=range(6), refusals=(), forward=forward, functional=functional)
    convolutions = graph("convolution.default", "convolution.default", "mm.default")
    choices = []
    for captured, engines in ((SMALL, ()), (SMALL, (LEVEL,)), (convolutions, (LEVEL,))):
        bundle: Any = record(graph=lambda name, file, of=captured: of, compiled=lambda target, name: object())
        choices.append(select_engine(bundle, program, Request(), targets=Choice(engines=engines)))
    assert [choice.engines for choice in choices] == [("autograd",), (LEVEL, "portable", "autograd"), ("autograd",)]
    assert choices[0].why_not["portable"] == "the other graph writes most of what it reads, and in place"
    assert (
        choices[2].why_not[LEVEL] == "most of its products are convolutions, which libraries make no faster in a step"
    )


@pytest.mark.parametrize(
    ("target", "options", "engines", "reason"),
    [
        (LEVEL, {"failed": {LEVEL: "no such file"}}, ("portable", "autograd"), "no such file"),
        (LEVEL, {"compiled": False}, ("portable", "autograd"), "it has none of this program"),
        (LEVEL, {"compiled": False, "refusals": ("it draws numbers",)}, ("portable", "autograd"), "it draws numbers"),
        ("cuda", {}, ("cuda", "portable", "autograd"), None),
        (
            "cuda",
            {"request": Request(memory_budget=0.5)},
            ("portable", "autograd"),
            "they save more for backward than the memory budget",
        ),
        ("cuda", {"request": Request(target="portable")}, ("portable", "autograd"), "target `portable` was asked for"),
    ],
)
def test_native_code_serves_a_program_unless_a_rule_says_why_not(target, options, engines, reason):
    choice = chosen(SMALL, LARGE, engines=(target,), prefers_onednn=lambda _: True, **options)
    assert (choice.engines, choice.why_not) == (engines, {target: reason} if reason else {})


@pytest.mark.parametrize(("device", "serves"), [("cpu", False), ("cuda", True), (None, True)])
def test_fused_attention_of_gpus_runs_on_processors_by_the_forward_graph(device, serves):
    functional = graph("_scaled_dot_product_efficient_attention.default")
    choice = chosen(SMALL, functional, Request(target="portable"), device=device)
    reason = "it has the fused attention of GPUs, and the bundle is on cpu"
    assert choice.why_not == ({} if serves else {"portable": reason})


# --- native code of a bundle ------------------------------------------------------------------------------

NATIVE = Request(trust="native")
HIGHER = "cpu-x86_64-v4"


def targets_of(request, *, kernels=True, programs=("infer",), device=None, unfit=None):
    """Return the choice among kernels and the libraries of two levels."""
    bundle = record(
        manifest=record(programs=[record(targets=("portable", "cuda") if kernels else ("portable",))]),
        target_names=(LEVEL, HIGHER),
        target=lambda name: record(programs=programs),
    )
    return select_targets(bundle, request, device=device, why_unfit=(unfit or {}).get)


@pytest.mark.parametrize(
    ("options", "engines", "why_not"),
    [
        (
            {"request": NATIVE, "kernels": False, "unfit": {HIGHER: "this processor has no AVX-512"}},
            (LEVEL,),
            {
                "cuda": "the bundle has no kernels. Export it with `--target cuda`",
                HIGHER: "this processor has no AVX-512",
            },
        ),
        (
            {"request": Request()},
            (),
            {
                "cuda": "kernels are native code, which runs only with `trust='native'`",
                **dict.fromkeys((HIGHER, LEVEL), "it holds native code, and was loaded without trust='native'"),
            },
        ),
        (
            {"request": NATIVE, "device": "cuda"},
            ("cuda",),
            dict.fromkeys((HIGHER, LEVEL), "it is for processors, and was loaded to cuda"),
        ),
    ],
    ids=["unfit", "untrusted", "device"],
)
def test_native_code_runs_unless_a_rule_says_why_not(options, engines, why_not):
    choice = targets_of(**options)
    assert (choice.engines, choice.why_not) == (engines, why_not)


# --- figures ----------------------------------------------------------------------------------------------


def test_libraries_with_little_to_fuse_leave_the_program_to_the_forward_graph():
    bert = graph(*["linear.default"] * 7, *["layer_norm.default"] * 2, *["add.Tensor"] * 4, of=meta(512, 384))
    gpt2 = graph(*["addmm.default"] * 5, *["layer_norm.default"] * 2, *["mul.Tensor"] * 10, of=meta(512, 384))
    choices = [chosen(each, LARGE, engines=(LEVEL,), prefers_onednn=lambda _: False) for each in (bert, gpt2)]
    assert [choice.engines[0] for choice in choices] == ["autograd", LEVEL]
    assert choices[0].why_not[LEVEL] == "it has too little to fuse to be faster than the forward graph"
    assert chosen(bert, LARGE, Request(target="cpu"), engines=(LEVEL,)).engines[0] == LEVEL
    assert chosen(bert, LARGE, engines=(LEVEL,), prefers_onednn=lambda _: True).engines[0] == LEVEL


def test_long_chain_of_element_wise_operators_runs_by_its_joint_graph():
    forward = graph(*["mul.Tensor"] * 9, *["mm.default"] * 3)
    for count, engine in ((64, "autograd"), (65, "portable")):
        assert chosen(forward, graph(*["mul.Tensor"] * count)).engines[0] == engine


@pytest.mark.parametrize(
    ("functional", "found"),
    [
        (matmul(128, 128, 128), (128, 128, 128)),
        (matmul(127, 128, 128), None),
        (matmul(1 << 14, 15, 1 << 14), None),
        (matmul(128, 128, 128, dtype="bfloat16"), None),
        (matmul("s0", 256, 256), (64, 256, 256)),
        (matmul("s0", 128, 128), None),
    ],
)
def test_matmuls_that_are_worth_a_choice_are_found(functional, found):
    largest = largest_matmul(functional)
    assert (None if largest is None else sizes_of(largest)) == found
