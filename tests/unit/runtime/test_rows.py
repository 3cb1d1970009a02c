"""Rows of a batch that know of each other are found in the graph, and those that do not are joined."""

import re

import msgspec
import pytest
import torch
from torch import nn
from torch.nn import functional

import aotexport
from aotexport_runtime.allowed.operators import aten_signatures
from aotexport_runtime.bundle.read import open_bundle
from aotexport_runtime.rows.analysis import RowAxes, dependence
from aotexport_runtime.rows.rules import DIMENSIONS, kinds, number_of
from aotexport_runtime.schema.sizes import SizeExpression
from aotexport_runtime.values.sizes import symbols_of

WIDTH, LENGTH = 6, 5


class Parts(nn.Module):
    """Parts of models that the functions below call."""

    def __init__(self):
        super().__init__()
        self.linear, self.gate, self.norm = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2), nn.LayerNorm(WIDTH)
        self.batch_norm = nn.BatchNorm1d(LENGTH)
        self.lstm = nn.LSTM(WIDTH, 4, bidirectional=True, batch_first=True)
        self.gru = nn.GRU(WIDTH, 4, num_layers=2)
        self.conv, self.words = nn.Conv1d(LENGTH, 4, 3), nn.Embedding(9, 4)
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.layer = nn.TransformerEncoderLayer(WIDTH, 2, 8, batch_first=True)
        self.register_buffer("token", torch.randn(1, 1, WIDTH))
        self.register_buffer("table", torch.randn(64, WIDTH))


def capacity(m, x):
    p, e = m.gate(x[:, 0]).softmax(-1).max(-1)
    hot = functional.one_hot(e, 2)
    return x[:, 0] + p[:, None] * ((hot.cumsum(0) * hot).sum(-1) <= 8)[:, None]


def written_through_a_view(m, x):
    y = x * 2
    y[:, 0].copy_(x[:, 1].sum(0))
    y[:, 1] = 0
    return y.cumsum(1)


def rows_into_what_has_none(m, x):
    total = torch.zeros(WIDTH)
    total += x.sum((0, 1))
    return x + total


DEPENDENT = {
    "capacity_of_experts": (capacity, "cumsum.default", "computes along axis 0 of `self`, which has the rows"),
    "greatest_of_the_call": (lambda m, x: x / x.abs().amax().clamp(min=4), "amax.default", "computes along axis 0"),
    "batch_statistics": (
        lambda m, x: functional.batch_norm(x, None, None, training=True),
        "batch_norm.default",
        "computes the statistics of the batch",
    ),
    "centred": (lambda m, x: x - x.mean(0), "mean.dim", "computes along axis 0"),
    "contrastive": (
        lambda m, x: (x[:, 0] @ x[:, 0].T).softmax(-1) @ x[:, 0],
        "matmul.default",
        "has the rows of its operands on different axes",
    ),
    "normalised_by_size": (lambda m, x: x / x.shape[0], "div.Tensor", "computes with the size of the batch"),
    "table_by_row": (
        lambda m, x: m.table.gather(1, (x[:, 0] > 0).long()),
        "gather.default",
        "takes elements by the number of the row",
    ),
    "shifted": (lambda m, x: torch.cat([x[1:], x[:1]]), "slice.Tensor", "computes along axis 0"),
    "rows_of_a_mask": (lambda m, x: x[x[:, 0, 0] > 0], "index.Tensor", "along axis 0 of `self`, which has the rows"),
    "chosen_rows": (lambda m, x: x + x[[0, 0]].sum(0), "index.Tensor", "along axis 0 of `self`, which has the rows"),
    "masked_by_position": (
        lambda m, x: x * (torch.arange(x.shape[0]) % 2)[:, None, None],
        "remainder.Scalar",
        "computes with the number of each row",
    ),
    "positions_of_rows": (
        lambda m, x: x + m.table[: x.shape[0]][:, None],
        "slice.Tensor",
        "has as many elements as there are rows",
    ),
    "merged_and_normalised": (
        lambda m, x: x.reshape(-1, WIDTH).softmax(0).view_as(x),
        "softmax.int",
        "computes along axis 0",
    ),
    "regrouped": (
        lambda m, x: x.transpose(0, 1).reshape(x.shape[0], LENGTH, WIDTH),
        "reshape.default",
        "spreads rows over several axes",
    ),
    "steps_of_a_sequence": (lambda m, x: m.gru(x)[0], "gru.input", "computes along axis 0 of `input`"),
    "blurred": (
        lambda m, x: functional.avg_pool1d(x.permute(1, 2, 0), 3, 1, 1),
        "avg_pool1d.default",
        "computes along",
    ),
    "dropout": (lambda m, x: functional.dropout(x, 0.5, True), "dropout.default", "draws random numbers"),
    "written_through_a_view": (written_through_a_view, "sum.dim_IntList", "computes along axis 0"),
    "rows_into_what_has_none": (rows_into_what_has_none, "sum.dim_IntList", "computes along axis 0"),
    "padded_batch": (lambda m, x: functional.pad(x, (0, 0, 0, 0, 1, 0))[:-1], "pad.default", "computes along axis 0"),
    "repeated": (lambda m, x: x.repeat(2, 1, 1).cumsum(1), "repeat.default", "changes the number of rows"),
}


def merged_and_back(m, x):
    return m.linear(x.view(-1, WIDTH)).view(x.shape[0], LENGTH, WIDTH)


def heads(m, x):
    q = m.linear(x).view(x.shape[0], LENGTH, 2, 3).transpose(1, 2).reshape(-1, LENGTH, 3)
    scores = torch.baddbmm(torch.zeros(1, 1, LENGTH), q, q.transpose(1, 2)).softmax(-1)
    return (scores @ q).view(x.shape[0], 2, LENGTH, 3).transpose(1, 2).flatten(2)


def windows(m, x):
    y = functional.pad(x, (0, 0, 0, 1)).view(x.shape[0], 2, 3, WIDTH).transpose(1, 2).reshape(-1, 2, WIDTH)
    return y.softmax(1).reshape(x.shape[0], 6, WIDTH)


def padding(m, x):
    mask = (x[:, :, 0] > 0)[:, None, None, :] & torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
    q = x[:, None]
    return functional.scaled_dot_product_attention(q, q, q, mask.expand(x.shape[0], -1, -1, -1))[:, 0].nan_to_num()


def written(m, x):
    y = torch.zeros(x.shape[0], LENGTH, WIDTH)
    y[:, 1:] = x[:, :-1]
    y[:, 0] = 1
    y[y > 0.5] = 0.0
    return y.relu_()


def last_of_each(m, x):
    return x[torch.arange(x.shape[0]), x[:, :, 0].argmax(-1)]


def mask_by_numbers(m, x):
    mask, rows = x[:, :, 0] > 0, torch.arange(x.shape[0])
    return x * mask[rows[:, None], torch.arange(LENGTH)[None, :]][:, :, None]


def experts(m, x):
    p, e = m.gate(x).topk(1)
    return x.new_zeros(x.shape[0], LENGTH, 2).scatter_(2, e, p) @ m.gate.weight


INDEPENDENT = {
    "mask_by_numbers": mask_by_numbers,
    "linear": lambda m, x: functional.gelu(m.norm(m.linear(x))),
    "batch_norm_of_evaluation": lambda m, x: m.batch_norm(x),
    "recurrent_over_steps": lambda m, x: m.gru(x.transpose(0, 1))[0][-1],
    "convolved": lambda m, x: functional.max_pool1d(m.conv(x), 2).flatten(1),
    "attention": lambda m, x: m.attention(x, x, x)[0],
    "transformer_layer": lambda m, x: m.layer(x),
    "token_repeated": lambda m, x: torch.cat([m.token.repeat(x.shape[0], 1, 1), x], 1).sum(1),
    "positions": lambda m, x: x + m.table[torch.arange(x.shape[1])],
    "merged_and_back": merged_and_back,
    "heads": heads,
    "windows": windows,
    "padding": padding,
    "written": written,
    "last_of_each": last_of_each,
    "experts": experts,
    "gathered": lambda m, x: x.gather(1, (x > 0).long()).cumsum(1).flip(1).roll(1, 1),
    "einsum": lambda m, x: torch.einsum("bld,bmd->blm", x, x).softmax(-1),
    "statistics_of_rows": lambda m, x: (x - x.mean((1, 2), keepdim=True)) / (x.std((1, 2), keepdim=True) + 1),
    "whole_slice": lambda m, x: x[: x.shape[0], ..., None, :].squeeze(2)[:, -1],
    "spectrum": lambda m, x: torch.fft.rfft(x, dim=1).abs(),
}


class All(Parts):
    """Every function, a result for each."""

    def forward(self, x):
        functions = {name: function for name, (function, *_) in DEPENDENT.items()} | INDEPENDENT
        return {name: function(self, x) for name, function in functions.items()}


def examples(seed, *sizes):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(size, LENGTH, WIDTH, generator=generator) for size in sizes]


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return All().eval()


@pytest.fixture(scope="module")
def reason(model, tmp_path_factory):
    """Return a function from a result's name to why it depends on other rows."""
    sizes = ({0: torch.export.Dim("batch", min=1, max=64)},)
    parts = exported_parts(model, tuple(examples(0, 3)), sizes, tmp_path_factory.mktemp("rows") / "all")

    def find(name):
        part, inputs, shape, dimension = parts(name, "batch")
        axes = [axis for axis, size in enumerate(shape) if dimension.symbol in symbols_of(size)]
        axes = RowAxes(dimension=dimension, inputs=dict.fromkeys(inputs, 0), outputs={0: axes[0] if axes else 0})
        return dependence(part, axes)

    return find


def exported_parts(model, arguments, sizes, path):
    """Export a model whose results have names; return a function from one, and a size, to the part of the graph.

    That is the nodes that compute the result, the indices of inputs, the shape of the result, and the size's record.
    """
    aotexport.export(model, arguments, output=path, dynamic_shapes=sizes, programs=("infer",), verify=False)
    bundle = open_bundle(path)
    program = bundle.program("infer")
    graph = bundle.graph("infer", program.forward.file)

    def part(name, size):
        index = program.output_tree.keys.index(name)
        output = graph.outputs[index]
        nodes = msgspec.structs.replace(graph, nodes=part_of(graph, output), outputs=[output])
        inputs = [index for index, spec in enumerate(program.inputs) if hasattr(spec, "path")]
        dimension = next(each for each in program.dimensions if each.name == size)
        return nodes, inputs, program.outputs[index].shape, dimension

    return part


def part_of(graph, output):
    """Return the nodes that compute an output, writes to what they take included."""
    roots, nodes, needed = {}, [], {output}
    for node in graph.nodes:
        base, source = node.op.partition(".")[0], node.args[0] if node.args else None
        shares = base in ("aten::select", "aten::slice", "aten::view") or base.endswith("_")
        roots[node.name] = roots.get(source, source) if shares else node.name
    for node in reversed(graph.nodes):
        changes = node.op.partition(".")[0].endswith("_") and roots[node.name] in {roots.get(name) for name in needed}
        if changes or node.name in needed:
            needed |= {node.name, *re.findall(r"'([\w:.]+)'", str((node.args, node.kwargs)))}
            nodes.append(node)
    return tuple(reversed(nodes))


@pytest.mark.parametrize("name", DEPENDENT)
def test_rows_that_know_of_each_other_are_told_by_operator_line_and_axis(name, reason):
    _, operator, text = DEPENDENT[name]
    found = reason(name)
    assert found is not None
    assert f"`aten::{operator}` (test_rows.py:" in found.replace("tests/unit/runtime/", "") or not operator, found
    assert text in found


@pytest.mark.parametrize("name", DEPENDENT)
def test_rows_that_are_said_to_know_of_each_other_do(name, model):
    function = DEPENDENT[name][0]
    assert not all(is_same(function, model, examples(seed, 21, 30)) for seed in range(3))


@pytest.mark.parametrize("name", INDEPENDENT)
def test_rows_that_do_not_know_of_each_other_are_joined(name, reason):
    assert reason(name) is None


@pytest.mark.parametrize("name", INDEPENDENT)
def test_rows_that_are_said_not_to_know_of_each_other_do_not(name, model):
    one, two, most = examples(0, 1, 3, 64)
    for calls in ([one, two * 100], [two, two], [two.flip(0), one, two * 0], [*most.split(9)]):
        assert is_same(INDEPENDENT[name], model, calls)


def is_same(function, model, calls):
    with torch.no_grad():
        joined, alone = function(model, torch.cat(calls)), [function(model, x) for x in calls]
    if joined.shape[0] != sum(len(x) for x in calls):
        return False
    return all(
        torch.allclose(got, expected, rtol=1e-4, atol=1e-4, equal_nan=True)
        for got, expected in zip(joined.split([len(x) for x in calls]), alone, strict=True)
        if got.shape == expected.shape
    )


POINTWISE_THOUGH_NOT_TAGGED = {
    *("__and__", "__iand__", "__ior__", "__or__", "absolute", "arccos", "arccosh", "arcsin", "arcsinh", "arctan"),
    *("arctan2", "arctanh", "broadcast_tensors", "complex", "copy", "divide", "empty_like", "fill", "fix"),
    *("floor_divide", "full_like", "greater", "greater_equal", "hardswish", "imag", "isclose", "isreal", "less"),
    *("less_equal", "log_sigmoid", "multiply", "negative", "not_equal", "ones_like", "polar", "real", "stack"),
    *("subtract", "zero", "zeros_like"),
}


def overloads(name):
    """Return the overloads of torch that a name of the table stands for."""
    base, _, overload = name.partition(".")
    packet = getattr(torch.ops.aten, base)
    return [getattr(packet, each) for each in packet.overloads() if overload in ("", each)]


def test_operators_of_the_table_may_be_in_bundles_and_none_draws_random_numbers_unasked():
    known = aten_signatures()
    assert [name for name in kinds() if name not in known and not any(k.startswith(f"{name}.") for k in known)] == []
    random = {name for name in kinds() for each in overloads(name) if torch.Tag.nondeterministic_seeded in each.tags}
    assert {kinds()[name][0] for name in random} == {"certain", "recurrent"}


def test_size_that_is_a_power_is_a_product():
    assert number_of(SizeExpression(op="pow", args=("s1", 2)), "s0") == number_of("s1", "s0") ** 2


def test_aligned_operators_are_those_that_torch_tags_as_pointwise():
    aligned = {name for name, kind in kinds().items() if kind == ("aligned", 0)}
    tagged = {name for name in aligned if any(torch.Tag.pointwise in each.tags for each in overloads(name))}
    assert aligned - tagged == POINTWISE_THOUGH_NOT_TAGGED


def test_operators_that_compute_along_axes_name_them_as_the_rule_does():
    names = {name for name, kind in kinds().items() if kind[0] == "along"}
    assert {
        name
        for name in names
        if not any(argument.name in DIMENSIONS for each in overloads(name) for argument in each._schema.arguments)
    } == set()
