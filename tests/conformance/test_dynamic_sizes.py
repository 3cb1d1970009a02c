"""Dynamic sizes and integers: the sizes that a bundle serves, and those that it refuses."""

import copy
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

import aotexport
import aotexport_runtime
from aotexport_runtime import CallInvalid
from tests.conformance.models import leaf, linear
from tests.refusals import refusal


def test_empty_batch_and_sequence_are_served(load):
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 2, 8, batch_first=True), 1)
    dims = {0: torch.export.Dim("batch"), 1: torch.export.Dim("time")}
    module = load(encoder.eval(), torch.randn(2, 3, 4), dynamic_shapes={"src": dims}, programs="infer").eval()
    with torch.no_grad():
        assert module(torch.randn(0, 0, 4)).shape == (0, 0, 4)
    told = "where `src_key_padding_mask` of the model is set, eager gives zeros if gradients are off, and calls do not"
    assert [note.text for note in module.bundle.program("infer").notes] == [f"program infer: {told}"]


def test_size_that_eager_refuses_is_outside_of_the_range(load):
    batch = {0: torch.export.Dim("batch")}
    module = load(nn.BatchNorm1d(4), torch.randn(3, 4), dynamic_shapes=(batch,), verify=True).train()
    with pytest.raises(CallInvalid, match=r"`batch` is 1, outside \[2:\]"):
        module(torch.randn(1, 4))
    assert module.eval()(torch.randn(1, 4)).shape == (1, 4)


def scaled(x, n, more):
    return x[: n + 1] * n - more["k"]


def test_dynamic_integers_are_numbers_of_the_call(load):
    dynamic = torch.export.Dim.DYNAMIC
    module = load(scaled, leaf(9, 2), 3, {"k": 5}, dynamic_shapes={"x": None, "n": dynamic, "more": {"k": dynamic}})
    x = leaf(9, 2)
    for n, k in ((0, -4), (1, 5), (8, 5), (2, 0)):
        assert torch.equal(module(x, n, {"k": k}), scaled(x, n, {"k": k}))
    assert refusal(CallInvalid, module, x, True, {"k": 2.0}) == (
        "the call does not fit program `train`:\n"
        "  - `n`: expected an int, got bool\n"
        "  - `more['k']`: expected an int, got float"
    )


def by_sign(x, n):
    return x * 2 if n > 0 else x * 3


def test_branch_on_a_dynamic_integer_is_a_guard(load, tmp_path):
    module = load(by_sign, torch.ones(2), 3, dynamic_shapes={"x": None, "n": torch.export.Dim.DYNAMIC}, verify=True)
    assert torch.equal(module(torch.ones(2), 1), torch.ones(2) * 2)
    with pytest.raises(CallInvalid, match=r"`n` is 0, outside \[1:\]"):
        module(torch.ones(2), 0)
    calls = {path.name.split(".")[1] for path in (tmp_path / "bundle/testvectors").glob("*.json")}
    assert {name for name in calls if name.startswith("n-is")} == {"n-is-1", "n-is-4"}


def named_by_size(x):
    return x * len(f"{x.shape[0]}")


def checked_and_branched(x):
    torch._assert(x.dim() == 2, f"expected rows, got {x.shape}")
    return x * 2 if x.sum() > 0 else x


def test_text_of_sizes_that_is_only_a_message_serves_other_sizes(load):
    module = load(
        checked_and_branched, torch.ones(4, 2), dynamic_shapes=({0: torch.export.Dim("rows", min=1)},), verify=True
    )
    for rows in (4, 1, 7):
        assert torch.equal(module(torch.ones(rows, 2)), torch.ones(rows, 2) * 2)


@pytest.mark.parametrize(
    ("function", "line"),
    [(named_by_size, "in named_by_size: "), (lambda x: sum(x[i] for i in range(x.shape[0])), "in <lambda>: ")],
)
def test_code_that_asks_for_a_dynamic_size_is_refused_with_its_line(load, function, line):
    with pytest.raises(aotexport.ExportFailed) as caught:
        load(function, torch.ones(4, 2), dynamic_shapes=({0: torch.export.Dim("rows")},))
    message = str(caught.value)
    assert Path(__file__).name in message
    assert message.endswith(
        f"{line}`x`: axis 0 was declared dynamic as `rows`, and the model works only for size 4, since code of the "
        "model asks for the number itself. Write it with operators that take sizes, or leave this axis static"
    )


def special_at_one(x):
    return x * 100 if x.shape[0] == 1 else x


def test_branch_on_size_one_asks_for_a_larger_example(load):
    with pytest.raises(aotexport.VerificationFailed) as caught:
        load(special_at_one, torch.ones(1, 4), dynamic_shapes=({0: torch.export.Dim.DYNAMIC},), verify=True)
    assert str(caught.value).splitlines()[0] == (
        "the model does something else where `x.shape[0]` is 0 or 1, as in the example, than for larger sizes: give a "
        "larger example, and 1 is served by a variant. Nothing was written; the calls disagreed with eager execution:"
    )


def test_hint_begins_at_zero_where_the_graphs_hold_for_it(load):
    hint = ({0: torch.export.Dim.DYNAMIC},)
    module, net = load(linear(), torch.randn(4, 3), dynamic_shapes=hint, verify=True), linear()
    for rows in (0, 1, 2):
        x = torch.randn(rows, 3)
        torch.testing.assert_close(module(x), net(x))
    with pytest.raises(CallInvalid, match=r"`x\.shape\[0\]` is 1, outside \[2:\]"):
        load(lambda x: x * 2, torch.ones(3), dynamic_shapes=hint, force=True)(torch.ones(1))


def test_hint_begins_at_two_where_the_model_does_something_else_before(tmp_path):
    hint = torch.export.Dim.AUTO
    arguments, shapes = (torch.ones(3, 4), torch.ones(5)), ({0: hint}, {0: hint})
    report = aotexport.export(
        lambda x, y: (special_at_one(x), y * 2), arguments, output=tmp_path / "bundle", dynamic_shapes=shapes
    )
    assert [note.text for note in report.notes] == [
        "`x.shape[0]` is in [2:], and [0:] was declared: `infer.2` serves 1"
    ]
    module = aotexport_runtime.load(tmp_path / "bundle")
    for rows in (1, 2):
        got, doubled = module(torch.ones(rows, 4), torch.ones(1))
        assert torch.equal(got, special_at_one(torch.ones(rows, 4)))
        assert torch.equal(doubled, torch.ones(1) * 2)
    with pytest.raises(CallInvalid, match=r"`x\.shape\[0\]` is 0, outside \[2:\]"):
        module(torch.ones(0, 4), torch.ones(5))
    assert aotexport_runtime.selftest(tmp_path / "bundle")


def picked_rows(x, labels):
    mask = torch.zeros(x.shape[0], 6).index_put((torch.arange(x.shape[0]), labels), torch.ones(()))
    return x + mask * x[mask == 1].cos().unsqueeze(1)


def up_to_the_longest(x, lengths):
    steps = torch.arange(int(lengths.max())).expand(lengths.shape[0], -1)
    return x.masked_fill((steps >= lengths[:, None])[..., None], 0.0)


def along_edges(x, edges):
    return x.index_add(0, edges[1], x[edges[0]] * 2)


ONE_ROW = {
    "picked_rows": (picked_rows, lambda n: (torch.randn(n, 6), torch.arange(1, n + 1) % 6), (0, 0)),
    "lengths": (up_to_the_longest, lambda n: (torch.randn(n, 9, 2), torch.tensor([9, 7, 5])[:n].flip(0)), (0, 0)),
    "edges": (along_edges, lambda n: (torch.randn(n, 4), torch.arange(10).reshape(2, 5) % n), (0, None)),
}


@pytest.mark.parametrize("name", ONE_ROW)
def test_one_row_is_served_where_eager_serves_one(name, load):
    function, arguments, axes = ONE_ROW[name]
    dynamic = tuple(None if axis is None else {axis: torch.export.Dim("batch", min=1, max=8)} for axis in axes)
    module = load(function, *arguments(3), dynamic_shapes=dynamic, programs="infer", verify=True)
    (dimension,) = module.bundle.program("infer").dimensions
    assert (dimension.min, module.bundle.program("infer").notes) == (1, ())
    for rows in (1, 2):
        args = arguments(rows)
        torch.testing.assert_close(module(*args), function(*args))


class PairLoss(nn.Module):
    """The mean distance of rows with one label; nothing to learn where no two rows have one."""

    def __init__(self):
        super().__init__()
        self.net = nn.Linear(4, 3)

    def forward(self, x, labels):
        y = self.net(x)
        first, second = (labels[:, None] == labels).fill_diagonal_(False).nonzero().unbind(1)
        return (y[first] - y[second]).square().sum(1).mean() if len(first) else (y * 0).sum()


class LastSize(nn.Module):
    """Does something else where the last call had another number of rows."""

    def __init__(self):
        super().__init__()
        self.both, self.net = 2, nn.Linear(4, 3)

    def forward(self, x):
        y = self.net(x)
        if self.both != 2 * x.shape[0]:
            self.both, y = 2 * x.shape[0], y * 2
        return y


def labelled(rows):
    return torch.randn(rows, 4), torch.arange(rows) // 2


APART = {
    "pairs": (PairLoss, labelled, "`batch` is in [2:], and [1:] was declared: `{}.2` serves 1"),
    "guard": (LastSize, lambda n: labelled(n)[:1], "calls of program `{0}` with 1 as `batch` run `{0}.3`"),
}


@pytest.mark.parametrize("name", ["pairs", pytest.param("guard", marks=pytest.mark.slow)])
def test_one_row_that_goes_another_way_is_served_by_a_variant(name, load, tmp_path):
    net, arguments, note = APART[name]
    torch.manual_seed(0)
    net, batch = net(), torch.export.Dim("batch", min=1)
    twin, dynamic = copy.deepcopy(net), tuple({0: batch} for _ in arguments(1))
    module = load(net, *arguments(6), dynamic_shapes=dynamic, verify=True, target="auto")
    for program in ("train", "infer"):
        assert note.format(program) in [each.text for each in module.bundle.program(program).notes]
    assert all(module.bundle.program(each).functional is not None for each in module.bundle.program_names)
    for each in (module, twin):
        each.train()
    for rows in (1, 6, 1, 1, 2, 3):
        args = arguments(rows)
        got, expected = module(*args), twin(*args)
        torch.testing.assert_close(got, expected)
        got.sum().backward()
        expected.sum().backward()
    for mine, theirs in zip(module.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)
    module.eval(), twin.eval()
    for rows in (3, 1, 1):
        args = arguments(rows)
        torch.testing.assert_close(module(*args), twin(*args))
    assert not any(result.not_run for result in aotexport_runtime.selftest(tmp_path / "bundle"))


def test_size_that_eager_fails_at_is_a_note_with_its_error(tmp_path):
    dynamic = ({0: torch.export.Dim("rows")},)
    report = aotexport.export(lambda x: x / x[1], (torch.randn(4, 2),), output=tmp_path / "b", dynamic_shapes=dynamic)
    assert [note.text for note in report.notes] == [
        "`rows` is in [2:], and [0:] was declared: the model fails where it is 1 (IndexError: index 1 is out of bounds "
        "for dimension 0 with size 1)"
    ]


def turned_and_back(x):
    y = x * 2
    return y.t().contiguous().t(), y.t()


def test_functional_graph_that_is_wrong_for_one_row_serves_more(load, tmp_path):
    batch = torch.export.Dim("batch")
    module = load(turned_and_back, leaf(4, 3), dynamic_shapes=({0: batch},), verify=True)
    assert aotexport_runtime.open_bundle(tmp_path / "bundle").program("train").functional is not None
    for rows in (1, 2):
        got = [t.untyped_storage().data_ptr() for t in module(leaf(rows, 3))]
        assert len(set(got)) == rows


@pytest.mark.filterwarnings("ignore:std.*degrees of freedom is <= 0:UserWarning")
def test_gradient_that_divides_by_a_size_less_one_is_that_of_eager(load):
    def spread(x):
        return x.std(0)

    module = load(spread, leaf(4, 2), dynamic_shapes=({0: torch.export.Dim("rows")},))
    for rows in (1, 2):
        x = torch.arange(2.0 * rows).reshape(rows, 2)
        got, expected = (
            torch.autograd.grad(f(point).sum(), point)
            for f in (module, spread)
            for point in [x.clone().requires_grad_()]
        )
        torch.testing.assert_close(got, expected, equal_nan=True)


def test_dynamic_sizes_of_a_tensor_subclass_are_refused_by_name(load):
    x = TwoTensor(torch.ones(3), torch.ones(3))
    with pytest.raises(
        aotexport.ExportFailed, match="`x` is a `TwoTensor`, and the sizes of tensor subclasses are fixed"
    ):
        load(named_by_size, x, dynamic_shapes=({0: torch.export.Dim("rows")},))
