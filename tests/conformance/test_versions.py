"""What autograd counts and protects: versions of tensors, saved ones changed since, views that nobody may change."""

import gc
import weakref

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import aotexport
import aotexport_runtime
from aotexport_runtime import NotSupported
from tests.refusals import refusal


def leaf(*shape):
    return torch.randn(*shape, requires_grad=True)


EXPORTED = {}
"""Bundles by the tests that need them."""


@pytest.fixture(params=["portable", "autograd"])
def load(tmp_path_factory, request):
    """Return a function that exports a callable, once for both targets, and loads the bundle for one."""

    def export_and_load(function, *args):
        test = request.node.name.replace(request.param, "")
        if test not in EXPORTED:
            path = tmp_path_factory.mktemp("versions") / "bundle"
            EXPORTED[test] = aotexport.export(function, args, output=path, verify=False).path
        return aotexport_runtime.load(EXPORTED[test], target=request.param)

    return export_and_load


def through_data(x, w):
    x.data.mul_(2)
    return x * w


def through_data_and_metadata(x, w):
    x.data.mul_(2)
    x.t_()
    return x.sum() * w


@pytest.mark.parametrize("function", [lambda x, w: x.add_(1).mul_(2) * w, through_data, through_data_and_metadata])
def test_versions_rise_as_in_eager(load, function):
    def rises(callable_):
        x, w = torch.ones(3, 4), leaf(3, 4)
        callable_(x, w)
        return x._version, w._version

    assert rises(load(function, torch.ones(3, 4), leaf(3, 4))) == rises(function)


def test_versions_of_running_statistics_rise_as_in_eager(load):
    eager = nn.BatchNorm1d(4)
    module = load(eager, torch.randn(3, 4))

    def rises(callable_):
        before = {name: buffer._version for name, buffer in callable_.named_buffers()}
        callable_(torch.randn(3, 4))
        return {name: buffer._version - before[name] for name, buffer in callable_.named_buffers()}

    assert rises(module) == rises(eager) == {"running_mean": 0, "running_var": 0, "num_batches_tracked": 1}


def changed_in_the_call(x, w):
    x.mul_(2)
    return x * w


def test_backward_raises_where_an_input_that_eager_saves_was_changed(load):
    module = load(changed_in_the_call, torch.ones(3, 4), leaf(3, 4))
    for callable_ in (changed_in_the_call, module):
        x = torch.ones(3, 4)
        loss = callable_(x, leaf(3, 4)).sum()
        with torch.no_grad():
            x.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def products(x, y):
    first = x * 2
    return first, first * y, (first + 1).sigmoid()


def test_change_of_inputs_and_outputs_raises_in_the_passes_in_which_eager_reads_them(load):
    def outcome(callable_, changed, used):
        tensors = [torch.full((3,), 0.5, requires_grad=True), torch.full((3,), 2.0, requires_grad=True)]
        outputs = callable_(*tensors)
        with torch.no_grad():
            (*tensors, *outputs)[changed].mul_(3)
        try:
            outputs[used].sum().backward()
        except RuntimeError as error:
            return "modified by an inplace operation" in str(error)
        return [tensor.grad if tensor.grad is None else tensor.grad.tolist() for tensor in tensors]

    module = load(products, leaf(3), leaf(3))
    for changed in range(5):
        for used in range(3):
            assert outcome(module, changed, used) == outcome(products, changed, used), (changed, used)


class Checkpointed(nn.Module):
    """Reads in a checkpointed part what it is called with, and what it closes over; its backward reads all of it."""

    use_reentrant = False

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.norm = nn.LayerNorm(4)

    def part(self, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            products = self.linear(x)
        return functional.dropout(self.norm(products.float()).exp(), 0.3)

    def forward(self, x):
        hidden = checkpoint(self.part, x * 2, use_reentrant=self.use_reentrant)
        return hidden * hidden


class CheckpointedReentrantly(Checkpointed):
    use_reentrant = True


def writes_to_data(module, x):
    for parameter in module.parameters():
        parameter.data.mul_(2)


def replaces_data(module, x):
    for parameter in module.parameters():
        parameter.data = parameter.data * 2


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("change", [writes_to_data, replaces_data])
@pytest.mark.parametrize("model", [Checkpointed, CheckpointedReentrantly])
def test_checkpointed_part_computes_gradients_from_what_it_reads_in_backward(load, model, change):
    def gradients(module):
        x = torch.ones(3, 4).requires_grad_()
        torch.manual_seed(0)
        result = module(x)
        change(module, x)
        result.sum().backward()
        return [x.grad, *[parameter.grad for parameter in module.parameters()], torch.rand(2)]

    eager = model()
    module = load(eager, leaf(3, 4))
    module.load_state_dict(eager.state_dict())
    for _ in range(2):
        for ours, theirs in zip(gradients(module), gradients(eager), strict=True):
            torch.testing.assert_close(ours, theirs)
        module.load_state_dict(eager.state_dict())
        module.zero_grad()
        eager.zero_grad()


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_change_of_what_a_checkpointed_part_was_called_with_raises(load, use_reentrant):
    def checkpointed(x, w):
        return checkpoint(lambda x: (x @ w).exp(), x, use_reentrant=use_reentrant)

    module = load(checkpointed, leaf(3, 4), leaf(4, 4))
    x = leaf(3, 4)
    loss = module(x, leaf(4, 4)).sum()
    with torch.no_grad():
        x.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_what_backward_checks_is_freed_with_the_graph(load):
    module = load(products, leaf(3), leaf(3))
    outputs = module(leaf(3), leaf(3))
    kept = weakref.ref(outputs[0].untyped_storage())
    loss = outputs[1].sum()
    del outputs
    loss.backward()
    gc.collect()
    assert kept() is None


def test_double_backward_refuses_to_compute_from_an_input_that_was_changed(new_bundle):
    def exponential(x):
        return x.exp()

    module = aotexport_runtime.load(new_bundle(exponential, leaf(3)), target="portable")
    x = leaf(3)
    result = module(x).sum()
    with torch.no_grad():
        x.add_(1)
    assert refusal(NotSupported, torch.autograd.grad, result, x, create_graph=True) == (
        "double backward computes the call anew, and its `input:x` was changed in place since. Load the bundle with "
        "target='autograd'"
    )


def test_two_calls_in_a_row_can_both_be_differentiated_where_kernels_write_statistics(load):
    module = load(nn.BatchNorm1d(4), torch.randn(3, 4))
    losses = [module(torch.randn(3, 4)).square().sum() for _ in range(2)]
    for loss in losses:
        loss.backward()


def row_of_rows(x):
    return x.unbind(0)[1][:2], x.sum()


@pytest.mark.parametrize("function", [lambda x: x.split(2), lambda x: (x * 2).chunk(2), row_of_rows])
def test_one_of_several_views_is_not_changed_in_place(load, function):
    module = load(function, leaf(4, 3))
    for callable_ in (function, module):
        output = callable_(leaf(4, 3))[0]
        with pytest.raises(RuntimeError, match="is a view and is being modified inplace"):
            output.mul_(2)


def test_view_made_under_no_grad_is_a_leaf_that_nobody_changes(load):
    def view_and_sum(x):
        y = x * 2
        with torch.no_grad():
            view = y.view(-1)
        return view, y.sum()

    module = load(view_and_sum, leaf(3, 4))
    for callable_ in (view_and_sum, module):
        view = callable_(leaf(3, 4))[0]
        assert view.requires_grad
        assert view.is_leaf
        with pytest.raises(RuntimeError, match="created in no_grad mode and is being modified inplace"):
            view.mul_(2)
