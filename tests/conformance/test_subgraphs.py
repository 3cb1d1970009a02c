"""Higher-order operators: gradients, tensors their subgraphs close over, and refusals by name."""

from functools import partial

import pytest
import torch
import torch.fx.traceback
from torch import nn
from torch.utils.checkpoint import checkpoint

import aotexport
import aotexport_runtime
from aotexport import ExportFailed
from aotexport_runtime import CallInvalid
from tests.models import module
from tests.refusals import refusal


def test_checkpointed_part_that_writes_to_buffers_is_refused(tmp_path):
    class Normalised(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm1d(4)

        def forward(self, x):
            return checkpoint(self.norm, x, use_reentrant=False)

    x = torch.randn(3, 4, requires_grad=True)
    with pytest.raises(ExportFailed) as caught:
        aotexport.export(Normalised(), (x,), output=tmp_path / "bundle", verify=False)
    line = f"{__file__}:{Normalised.forward.__code__.co_firstlineno + 1}: in forward: "
    assert str(caught.value) == (
        f"{line}a checkpointed part of the model writes to `norm.num_batches_tracked`, and eager writes again when it "
        "computes the part anew in backward, which a bundle does not. Take it out of the checkpoint"
    )


def drawing_branch(x, w):
    def yes(x, w):
        return torch.nn.functional.dropout((x * w).exp())

    return torch.cond(x.sum() > 0, yes, lambda x, w: (x - w) * torch.rand(4), (x, w))


def drawing_branch_that_is_not_used(x, w):
    drawing_branch(x, w)
    return torch.nn.functional.dropout(x * w)


def drawn(function, x, w):
    """Return the result, the gradients and where the generator is after them."""
    torch.manual_seed(0)
    y = function(x, w)
    return [y, *torch.autograd.grad(y.sum(), [x, w], allow_unused=True), torch.rand(1)]


@pytest.mark.parametrize(
    "function",
    [
        drawing_branch,
        lambda x, w: torch._higher_order_ops.map(lambda x, w: torch.nn.functional.dropout((x * w).exp()), x, w),
        drawing_branch_that_is_not_used,
    ],
    ids=lambda function: function.__name__,
)
def test_subgraph_that_draws_has_the_gradients_of_eager(tmp_path, function):
    x, w = torch.linspace(-1, 2, 12).reshape(3, 4).requires_grad_(), torch.ones(4, requires_grad=True)
    # A functional graph lacks the branch that is not used, with its draws: verification leaves such a graph out.
    aotexport.export(function, (x, w), output=tmp_path / "bundle", verify=function is drawing_branch_that_is_not_used)
    for target in ("portable", "autograd"):
        loaded = aotexport_runtime.load(tmp_path / "bundle", target=target)
        for mine, theirs in zip(drawn(loaded, x, w), drawn(function, x, w), strict=True):
            torch.testing.assert_close(mine, theirs)


def test_branch_that_draws_inside_of_a_loop_is_refused(tmp_path):
    def function(x, w):
        return torch._higher_order_ops.map(drawing_branch, x, w)

    x, w = torch.ones(3, 4, requires_grad=True), torch.ones(4)
    assert refusal(ExportFailed, aotexport.export, function, (x, w), output=tmp_path / "bundle", verify=False) == (
        f"test_subgraphs.py:{function.__code__.co_firstlineno + 1}: in function: `cond` inside of `map` draws random "
        "numbers on the way to gradients; its backward in torch draws others, in an order that a bundle cannot keep. "
        "Draw before it, and pass the numbers in"
    )


def plain_loop(x, w):
    def step(i, x):
        return i + 1, (x * w).sin() + x

    return torch._higher_order_ops.while_loop(lambda i, x: i < 3, step, (torch.tensor(0), x))[1]


def test_loop_whose_gradients_depend_on_what_requires_grad_is_refused_for_others(load):
    x, w = torch.ones(3, 4, requires_grad=True), torch.ones(4, requires_grad=True)
    loaded = load(plain_loop, x, w, target="auto")
    with pytest.raises(aotexport_runtime.CallInvalid, match="`x`: expected requires_grad=True"):
        loaded(x.detach(), w)
    transposed = x.detach().t().contiguous().t().requires_grad_()
    assert loaded(transposed, w).stride() == plain_loop(transposed, w).stride() == (4, 1)


def test_loop_without_a_step_equals_eager(tmp_path):
    def loop(x, w, count):
        def step(i, x):
            return i + 1, torch.nn.functional.dropout(x * w) + x

        return torch._higher_order_ops.while_loop(lambda i, x: i + torch.rand(()) < count, step, (torch.tensor(0), x))[
            1
        ]

    x, w = torch.linspace(-1, 1, 4, requires_grad=True), torch.ones(4, requires_grad=True)
    aotexport.export(loop, (x, w, torch.tensor(2)), output=tmp_path / "bundle", verify=False)
    for target in ("portable", "autograd"):
        loaded = aotexport_runtime.load(tmp_path / "bundle", target=target)
        for count in map(torch.tensor, (0, 2)):
            results = [drawn(partial(function, count=count), x, w) for function in (loaded, loop)]
            for mine, theirs in zip(*results, strict=True):
                torch.testing.assert_close(mine, theirs)
        with torch.no_grad():
            result = loaded(x, w, torch.tensor(0))
        torch.testing.assert_close(result, x.detach())
        assert result.untyped_storage().data_ptr() != x.untyped_storage().data_ptr()


def counting(run):
    """Counts what it does in a buffer, within a branch or a loop."""
    return module(lambda self, x: self.run(self, x), linear=nn.Linear(4, 4), count=torch.zeros(()), run=run)


def counting_branches(module, x):
    def positive(x):
        module.count.add_(1)
        return module.linear(x)

    def negative(x):
        module.count.sub_(1)
        return x * 2

    return torch.cond(x.sum() > 0, positive, negative, (x,))


def counting_loop(module, x):
    def step(i, x):
        module.count.add_(1)
        return i + 1, (x @ module.linear.weight).tanh()

    return torch._higher_order_ops.while_loop(lambda i, x: i < 3, step, (torch.tensor(0), x))[1]


@pytest.mark.parametrize("run", [counting_branches, counting_loop])
def test_branches_and_loops_that_write_to_state_are_served_without_gradients(load, run):
    module = counting(run).eval()
    infer = aotexport.Program("infer", mode="eval", grad=False)
    loaded = load(module, torch.ones(2, 4), programs=[infer], target="auto").eval()

    with torch.no_grad():
        for x in (torch.ones(2, 4), -torch.ones(2, 4), torch.full((2, 4), 3.0)):
            assert torch.equal(loaded(x), module(x))
            assert torch.equal(loaded.count, module.count)
    with pytest.raises(CallInvalid, match=r"expected torch.is_grad_enabled\(\) to be False, as at capture"):
        loaded(torch.ones(2, 4))


OFFSETS = torch.tensor([1.0, 2.0, 3.0])


def constants_in_branches(x):
    def changed(x):
        return x * torch.tensor([0.0, 1.0, 2.0]).add_(1)

    return torch.cond(x.sum() > 0, changed, lambda x: x * OFFSETS + torch.tensor(4.0), (x,))


@pytest.mark.parametrize(
    "function",
    [constants_in_branches, lambda x: torch._higher_order_ops.map(lambda row: row * OFFSETS + torch.tensor(1.0), x)],
    ids=lambda function: function.__name__,
)
def test_subgraph_makes_tensors_of_numbers_as_eager_does(tmp_path, function):
    example = torch.linspace(0, 1, 6).reshape(2, 3).requires_grad_()
    aotexport.export(function, (example,), output=tmp_path / "bundle", verify=False)
    for target in ("portable", "autograd"):
        loaded = aotexport_runtime.load(tmp_path / "bundle", target=target)
        for x in (example, example.detach().neg().requires_grad_(), example):
            results = [call(x) for call in (loaded, function)]
            torch.testing.assert_close(*results)
            torch.testing.assert_close(*(torch.autograd.grad(result.sum(), x) for result in results))


def test_export_of_views_that_require_grad_leaves_no_annotations(tmp_path):
    x = torch.ones(4, 3, requires_grad=True).clone()[:2]
    aotexport.export(lambda x: x * 2, (x,), output=tmp_path / "bundle", verify=False)
    assert torch.fx.traceback.get_current_meta() == {}


def partly_detached_scan(x, w):
    def step(carried, row):
        return (carried[0] * w + row.detach(), carried[1] + 1), (carried[0].clone(), row.detach() * 2)

    carried, rows = torch._higher_order_ops.scan(step, (torch.zeros(4), torch.zeros(4)), x)
    return *carried, *rows


def partly_detached_loop(x, w):
    def step(i, y, z):
        return i + 1, (y * w).sin(), z * 2

    return torch._higher_order_ops.while_loop(lambda i, y, z: i < 3, step, (torch.tensor(0), x, x.detach() + 1))


def branch_changed_in_place(x, w):
    y, z = torch.cond(x.sum() > 0, lambda x: ((x * w).exp(), x + w), lambda x: (x - w, x * 2), (x,))
    return y.mul_(2), z


@pytest.mark.parametrize(
    ("function", "with_grad"),
    [
        (partly_detached_scan, (False, True)),
        pytest.param(partly_detached_loop, (True, False), marks=pytest.mark.slow),
        (branch_changed_in_place, (True, True)),
    ],
)
def test_results_of_subgraphs_have_the_history_of_eager(tmp_path, function, with_grad):
    x, w = (torch.rand(*shape).requires_grad_(grad) for shape, grad in zip([(2, 4), (4,)], with_grad, strict=True))
    aotexport.export(function, (x, w), output=tmp_path / "bundle", verify=False)

    def facts(function):
        found = []
        for result in function(x, w):
            found.append((result.is_leaf, result.requires_grad, result.stride(), result.detach()))
            if result.requires_grad:
                leaves = [tensor for tensor in (x, w) if tensor.requires_grad]
                found.append(torch.autograd.grad(result.sum(), leaves, retain_graph=True, allow_unused=True))
        return found

    expected = facts(function)
    for target in ("portable", "autograd"):
        torch.testing.assert_close(facts(aotexport_runtime.load(tmp_path / "bundle", target=target)), expected)
