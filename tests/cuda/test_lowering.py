"""What lowered graphs hold: each pitfall of the way there."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from aotexport.lower.build import unshared
from aotexport.lower.cuda import lowering
from aotexport.lower.cuda.retarget import CannotLower
from aotexport.lower.cuda.sources import parse
from aotexport_runtime.schema.graph import Graph, GraphInput, Node
from aotexport_runtime.schema.program import FreshOutput, FunctionalGraph
from aotexport_runtime.schema.sizes import SizeExpression
from aotexport_runtime.schema.values import SizeArgument, TensorMeta
from tests.cases.functions import Views
from tests.cases.operators import scale_
from tests.cuda.lowered import launches, lowered, operators
from tests.gpu.models import Block
from tests.refusals import refusal


def tensor_meta(shape, stride):
    return TensorMeta(dtype="float32", shape=shape, stride=stride, device="cuda")


def test_argument_that_is_fixed_in_the_kernel_is_not_passed():
    program = lowered(lambda x: x.sum(), torch.randn(1000))
    (kernel,), (launch,) = program.kernels, launches(program)
    assert "xnumel" not in launch.kwargs
    assert kernel.candidates[0].grid == (1, 1, 1)


def test_dynamic_size_is_an_expression_of_the_programs_symbols():
    batch = torch.export.Dim("batch", min=2, max=64)
    program = lowered(lambda x: (x * 2).relu(), torch.randn(4, 8), dynamic_shapes=({0: batch},))
    numel = launches(program)[0].kwargs["xnumel"]
    assert isinstance(numel, SizeArgument)
    assert isinstance(numel.value, SizeExpression)
    assert not any(op.startswith(("python::", "aten::sym_")) for op in operators(program))


@pytest.mark.parametrize(("dtype", "fuses"), [(torch.float32, True), (torch.bfloat16, False), (torch.float16, False)])
def test_products_and_sums_are_kept_apart_where_16_bits_are_rounded(dtype, fuses):
    program = lowered(lambda x: (x * 2).sin() + x, torch.randn(4, 8, dtype=dtype))
    options = [candidate.options for kernel in program.kernels for candidate in kernel.candidates]
    assert {each["enable_fp_fusion"] for each in options} == {fuses}


def test_saved_size_is_no_input_of_the_backward():
    batch = torch.export.Dim("batch", min=2, max=64)
    module = nn.Sequential(nn.Linear(8, 8), nn.Flatten(0), nn.Unflatten(0, (-1, 4)), nn.Tanh())
    program = lowered(module, torch.randn(4, 8), program="train", dynamic_shapes=({0: batch},))
    backward = program.graphs["backward.json"]
    assert len(backward.inputs) == program.record.saved + 1
    assert all(value.meta.device == "cuda" for value in backward.inputs)


def test_backward_reads_saved_values_in_the_layout_that_the_forward_saves():
    module = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.AdaptiveAvgPool2d(1))
    program = lowered(module, torch.randn(2, 3, 8, 8), program="train")
    forward, backward = program.graphs["forward.json"], program.graphs["backward.json"]
    metas = {value.name: value.meta for value in (*forward.inputs, *forward.nodes)}
    saved = [metas[name] for name in forward.outputs[-program.record.saved :]]
    assert [meta.stride for meta in saved] == [v.meta.stride for v in backward.inputs[: program.record.saved]]


def test_view_inside_an_input_is_relative_to_it():
    program = lowered(lambda x, w: torch.mm(x, w[2:]), torch.randn(4, 8), torch.randn(10, 3))
    names = operators(program)
    assert "aten::slice.Tensor" in names
    assert all(
        len(node.args) == 3 for node in program.graphs["forward.json"].nodes if node.op == "aten::as_strided.default"
    )


def test_result_of_a_library_is_laid_out_as_kernels_read_it():
    program = lowered(lambda x, w: functional.conv2d(x, w).relu(), torch.randn(1, 3, 8, 8), torch.randn(4, 3, 3, 3))
    names = operators(program)
    assert names[names.index("aten::convolution.default") + 1] == "aten::contiguous.default"


def test_operator_that_only_backwards_have_reads_a_contiguous_gradient():
    def enlarged(x):
        return functional.interpolate(x, scale_factor=2, mode="bilinear", antialias=True).transpose(2, 3).contiguous()

    program = lowered(enlarged, torch.randn(1, 2, 3, 4, requires_grad=True), program="train")
    nodes = {node.op: node for node in program.graphs["backward.json"].nodes}
    assert nodes["aten::empty_strided.default"].meta.stride == (96, 48, 8, 1)
    assert nodes["aten::_upsample_bilinear2d_aa_backward.default"].args[0] == nodes["aten::empty_strided.default"].name


def test_input_that_the_call_changes_is_saved_as_it_was_before():
    def changing(x, w):
        result = (x.clone() * w).sum()
        x.add_(1)
        return result

    graph = lowered(changing, torch.randn(3, 4), torch.randn(3, 4, requires_grad=True), program="train").graphs[
        "forward.json"
    ]
    assert "aten::copy_.default" in [node.op for node in graph.nodes]
    assert not {value.name for value in graph.inputs} & set(map(str, graph.outputs))


def test_part_of_an_input_that_the_call_changes_is_saved_with_its_gaps():
    def changing(x, w):
        result = x.clone()[:, ::2] * w
        x.add_(1)
        return result

    program = lowered(changing, torch.randn(4, 6), torch.randn(4, 3, requires_grad=True), program="train")
    nodes = {node.name: node for node in program.graphs["forward.json"].nodes}
    saved = nodes[program.graphs["forward.json"].outputs[-1]]
    place = nodes[saved.args[0]]
    assert (place.op, place.args) == ("aten::empty_strided.default", [[4, 3], [6, 2]])
    assert program.graphs["backward.json"].inputs[0].meta.stride == (6, 2)


@pytest.mark.parametrize(
    ("function", "program"),
    [
        (lambda x: x.split(2), "train"),
        (lambda x: Views.apply(x), "train"),
        (lambda x: (x.as_strided_((2, 3), (4, 1)) * 2, x)[0], "infer"),
    ],
    ids=["several views", "custom function", "metadata"],
)
def test_result_that_shares_memory_with_an_input_in_the_functional_graph_is_not_copied(function, program):
    found = lowered(function, torch.randn(3, 4, requires_grad=program == "train"), program=program)
    assert not {"aten::clone.default", "aten::copy_.default"}.intersection(operators(found))


def test_view_of_memory_of_the_graph_itself_is_one_operator():
    found = lowered(Block(32, 2), torch.randn(2, 16, 32))
    offsets = [node.args[3] for node in found.graphs["forward.json"].nodes if len(node.args) == 4]
    assert {32, 64} <= set(offsets)
    assert "aten::slice.Tensor" not in operators(found)


def test_copy_repeats_elements_as_the_value_does():
    row, rows = tensor_meta((1, 6), (6, 1)), tensor_meta((4, 6), (0, 1))
    expanded = Node(name="expanded", op="aten::as_strided.default", args=["x", [4, 6], [0, 1]], meta=rows)
    graph = Graph(inputs=(GraphInput(name="x", meta=row),), nodes=(expanded,), outputs=["expanded"])
    own = Node(name="own", op="aten::clone.default", args=["x"], meta=rows)
    functional = Graph(inputs=graph.inputs, nodes=(own,), outputs=["own"])
    copied = unshared(graph, functional, FunctionalGraph(file="inference.json", outputs=(FreshOutput(),)))
    operators = ["empty_strided.default", "as_strided.default", "copy_.default", "as_strided.default"]
    assert [node.op.removeprefix("aten::") for node in copied.nodes[1:]] == operators
    assert copied.nodes[1].args == [[1, 6], [0, 1]]
    assert copied.nodes[-1].meta == rows


def test_outputs_keep_the_layout_of_eager():
    def turned(x):
        return (x * 2).permute(2, 0, 1)

    x = torch.randn(2, 3, 4)
    graph = lowered(turned, x).graphs["forward.json"]
    metas = {value.name: value.meta for value in (*graph.inputs, *graph.nodes)}
    assert metas[graph.outputs[0]].stride == turned(x).stride()


def test_random_numbers_come_from_one_seed_per_graph():
    program = lowered(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)), torch.randn(4, 8), program="train")
    assert operators(program).count("aten::randint.low_out") == 1


def test_atomic_additions_lower():
    def scattered(x, index):
        return torch.zeros(4, 8).index_add(0, index, x)

    assert launches(lowered(scattered, torch.randn(6, 8), torch.tensor([0, 1, 2, 3, 0, 1])))


def test_alignment_that_kernels_assume_is_recorded():
    program = lowered(lambda x: x.relu(), torch.randn(32))
    assert set(program.kernels[0].divisible) >= {"in_ptr0", "out_ptr0"}


def test_guards_that_the_lowering_adds_are_recorded(monkeypatch):
    compile_for_gpu = lowering.compile_for_gpu

    def assuming(module, mode, **kwargs):
        symbol = next(iter(mode.shape_env.var_to_range))
        node = module.graph.find_nodes(op="placeholder")[0]
        assert bool(node.meta["val"].shape[0] < 50), symbol
        return compile_for_gpu(module, mode, **kwargs)

    monkeypatch.setattr(lowering, "compile_for_gpu", assuming)
    batch = torch.export.Dim("batch", min=2, max=64)
    program = lowered(lambda x: x.relu(), torch.randn(4, 8), dynamic_shapes=({0: batch},))
    (guard,) = program.record.guards
    assert (guard.op, guard.args[1]) in (("lt", 50), ("le", 49))


def test_custom_operator_that_writes_gets_copies_of_what_others_read():
    def written(x, y):
        hidden = x.sin()
        scale_(hidden[0], y)
        return hidden.relu(), x

    program = lowered(written, torch.randn(3, 4), torch.randn(4))
    names = operators(program)
    place = names.index("aotexport_cases::scale_.default")
    assert any(op.startswith("kernel::") for op in names[:place])
    assert any(op.startswith("kernel::") for op in names[place:])
    assert not {value.name for value in program.graphs["forward.json"].inputs} & {
        node.args[0] for node in program.graphs["forward.json"].nodes if node.op == "aotexport_cases::scale_.default"
    }


def branching(x):
    return x.sin() if x.sum() > -100 else x.cos()


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda x: x[x > 0].relu().sum(), "it has sizes that only the data of a call know"),
        (
            lambda x: torch.cond(x.sum() > 0, lambda x: x.sin(), lambda x: x.cos(), (x,)),
            "it calls graphs of their own, by `cond`",
        ),
        (branching, "it checks values of tensors, on which the path through the code depends"),
        (lambda x: torch.geqrf(x), "torch does not tell what operator `aten.geqrf.default` returns without running it"),
    ],
)
def test_program_that_the_format_of_kernels_cannot_hold_is_refused(function, reason):
    assert refusal(CannotLower, lowered, function, torch.randn(4, 4)) == reason


def solved(matrix, right):
    return torch.linalg.solve(matrix.relu(), right).relu()


def test_operators_of_libraries_and_their_checks_for_errors_are_called_between_kernels():
    matrix, right = torch.eye(3).requires_grad_(), torch.randn(3, 2)
    program = lowered(solved, matrix, right, program="train")
    names = operators(program)
    assert {"aten::_linalg_solve_ex.default", "aten::_linalg_check_errors.default"} <= set(names)
    assert launches(program)
    assert "aten::linalg_lu_solve.default" in operators(program, "backward.json")


def test_workspace_is_zeroed_before_the_kernel_that_counts_in_it():
    names = operators(lowered(lambda x: x.cumsum(1), torch.randn(2, 200_000)))
    place = names.index("aten::zero_.default")
    assert names[place + 1].startswith("kernel::")


def test_recurrence_over_many_steps_is_refused_and_over_few_is_not(monkeypatch):
    assert launches(lowered(nn.LSTM(4, 4), torch.randn(6, 1, 4), program="train"))
    monkeypatch.setattr(lowering, "UNROLLED_NODES", lowering.UNROLLED_NODES // 10)
    with pytest.raises(CannotLower, match="step by step"):
        lowered(nn.LSTM(4, 4), torch.randn(6, 1, 4), program="train")


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("-((xnumel) // -(128))", SizeExpression(op="ceildiv", args=("xnumel", 128))),
        ("xnumel", "xnumel"),
        ("max(a, 3)", SizeExpression(op="max", args=("a", 3))),
        ("(0 if d == 0 else n // d)", SizeExpression(
            op="where",
            args=(SizeExpression(op="eq", args=("d", 0)), 0, SizeExpression(op="floordiv", args=("n", "d"))),
        )),
        ("a - b", SizeExpression(op="add", args=("a", SizeExpression(op="mul", args=(-1, "b"))))),
    ],
)  # fmt: skip
def test_grid_is_read_as_an_expression(source, expected):
    assert parse(source) == expected


@pytest.mark.parametrize("source", ["__import__('os').getpid()", "a.b", "[1][0]", "1.5", "f(x)"])
def test_grid_of_anything_but_arithmetic_is_refused(source):
    assert refusal(CannotLower, parse, source) == f"the grid `{source}` of a kernel cannot be expressed"
