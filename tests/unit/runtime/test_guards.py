"""Guards: hard ones refuse a call in words, soft ones send it to the forward graph."""

from typing import Any

import msgspec
import pytest
import torch

from aotexport_runtime.guards.arguments import argument_rows
from aotexport_runtime.guards.rule import GuardTable
from aotexport_runtime.schema.program import ArgumentInput, ForwardGraph, Program, SizeInput
from aotexport_runtime.schema.sizes import Dimension, SizeExpression
from aotexport_runtime.schema.trees import Sequence
from aotexport_runtime.schema.values import TensorMeta


def tensor(path: str, *shape: Any, dtype: Any = "float32", device: str = "cpu") -> ArgumentInput:
    return ArgumentInput(path=path, meta=TensorMeta(dtype=dtype, shape=shape, stride=(1,) * len(shape), device=device))


def dimension(symbol: str, name: str, index: int = 0, axis: int = 0, **fields: Any) -> Dimension:
    return Dimension(symbol=symbol, name=name, input_index=index, axis=axis, **{"min": 2, "max": 64, **fields})


def size(op: Any, *args: Any) -> SizeExpression:
    return SizeExpression(op=op, args=args)


def check(program: Program, *leaves: Any, devices: tuple[str, ...] = ()) -> tuple[dict[str, int], list[str]]:
    symbols: dict[str, int] = {}
    violations = GuardTable([argument_rows(program, devices)], len(leaves)).check(list(leaves), symbols)
    return symbols, violations


def program(*inputs: Any, dimensions: tuple[Any, ...] = (), guards: tuple[Any, ...] = ()) -> Program:
    return Program(
        name="train",
        mode="train",
        grad=True,
        parameters=(),
        inputs=inputs,
        outputs=(),
        output_tree=Sequence(type="tuple", items=()),
        dimensions=dimensions,
        guards=guards,
        forward=ForwardGraph(file="forward.json"),
    )


STATIC = program(tensor("x", 2, 3), tensor("ids[0]", 4, dtype="int64"))
BATCH = program(
    tensor("x", "b", 3),
    tensor("y", "b", size("mul", 2, "b")),
    dimensions=(dimension("b", "batch"),),
    guards=(size("eq", size("mod", "b", 2), 0),),
)
HALVES = program(
    tensor("x", size("add", size("mul", 2, "h"), 1)), dimensions=(dimension("h", "half", factor=2, offset=1),)
)
OPEN = program(tensor("x", "n"), dimensions=(dimension("n", "n", min=5, max=None),))
COUNT = program(tensor("x", "b"), SizeInput(path="n", symbol="b"), dimensions=(dimension("b", "batch"),))
RATIO = program(
    tensor("x", "b"), tensor("y", size("floordiv", 12, size("add", "b", -2))), dimensions=(dimension("b", "batch"),)
)
MATRIX = TensorMeta(dtype="float32", shape=(2, 3), stride=(3, 1), device="cpu", offset=3)
LAID_OUT = msgspec.structs.replace(program(ArgumentInput(path="x", meta=MATRIX)), fixed=("layout",))
OTHER_LAYOUT = (
    "`x`: expected strides (3, 1) and storage offset 3, as at capture, since the model's code reads the layout of "
    "tensors; got "
)
WITH_GRAD = TensorMeta(dtype="float32", shape=(3,), stride=(1,), device="cpu", requires_grad=True)
LEAF, HISTORY = (
    msgspec.structs.replace(
        program(ArgumentInput(path="x", meta=WITH_GRAD, is_leaf=is_leaf)), fixed=("requires_grad", "is_leaf")
    )
    for is_leaf in (True, False)
)
OTHER_LEAF = "as at capture, since the model's code reads it; got"
IDS = torch.zeros(4, dtype=torch.int64)


@pytest.mark.parametrize(
    ("record", "leaves", "symbols"),
    [
        (STATIC, (torch.zeros(2, 3), IDS), {}),
        (BATCH, (torch.zeros(4, 3), torch.zeros(4, 8)), {"b": 4}),
        (HALVES, (torch.zeros(9),), {"h": 4}),
        (OPEN, (torch.zeros(5000),), {"n": 5000}),
        (COUNT, (torch.zeros(3), 3), {"b": 3}),
        (RATIO, (torch.zeros(5), torch.zeros(4)), {"b": 5}),
        (LAID_OUT, (torch.zeros(9)[3:].view(2, 3),), {}),
        (LEAF, (torch.zeros(3, requires_grad=True),), {}),
        (HISTORY, (torch.zeros(3, requires_grad=True) * 1,), {}),
    ],
)
def test_call_that_fits_binds_the_symbols(record, leaves, symbols):
    assert check(record, *leaves) == (symbols, [])


def fixed(axis):
    return f'; its sizes are fixed as in the example, an export with --dynamic "{axis}=NAME" lets this one vary'


VIOLATIONS = {
    "static_size": (
        STATIC,
        (torch.zeros(2, 4), IDS),
        ["`x`: expected shape [2, 3], got [2, 4] at axis 1" + fixed("x:1")],
    ),
    "layout": (STATIC, (torch.zeros(2, 3).to_sparse(), IDS), ["`x`: expected layout strided, got sparse_coo"]),
    "strides": (LAID_OUT, (torch.zeros(9)[3:].view(3, 2).t(),), [f"{OTHER_LAYOUT}(1, 2) and 3"]),
    "no_leaf": (LEAF, (torch.zeros(3, requires_grad=True) * 1,), [f"`x`: expected is_leaf=True, {OTHER_LEAF} False"]),
    "no_requires_grad": (HISTORY, (torch.zeros(3),), [f"`x`: expected requires_grad=True, {OTHER_LEAF} False"]),
    "guard": (
        BATCH,
        (torch.zeros(5, 3), torch.zeros(5, 10)),
        ["the program holds only where ((batch % 2) == 0); here batch=5"],
    ),
    "not_a_multiple": (HALVES, (torch.zeros(8),), ["`x`: size 0 is 8; expected 2 * half + 1"]),
    "truth_value": (COUNT, (torch.zeros(3), True), ["`n`: expected an int, got bool"]),
    "another_integer": (COUNT, (torch.zeros(3), 4), ["`n`: expected 3, got 4"]),
    "division_by_zero": (
        RATIO,
        (torch.zeros(2), torch.zeros(4)),
        ["`y`: expected shape [(12 // (batch + -2))], got [4] at axis 0 ((12 // (batch + -2)) = None)"],
    ),
}


@pytest.mark.parametrize(("record", "leaves", "expected"), VIOLATIONS.values(), ids=VIOLATIONS)
def test_call_that_does_not_fit_is_told_every_violation(record, leaves, expected):
    assert check(record, *leaves)[1] == expected


def test_call_of_a_program_loaded_elsewhere_needs_tensors_there():
    violations = check(STATIC, torch.zeros(2, 3), IDS, devices=("meta",))[1]
    assert violations == [
        "`x`: expected a tensor on meta, got one on cpu",
        "`ids[0]`: expected a tensor on meta, got one on cpu",
    ]
