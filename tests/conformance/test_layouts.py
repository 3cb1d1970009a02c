"""Calls with other layouts, and code that reads layouts and history of its arguments."""

import inspect
from pathlib import Path

import numpy
import pytest
import torch
from torch.export import Dim

from aotexport_runtime import CallInvalid
from tests.conformance.models import leaf


def test_example_that_is_a_slice_has_dynamic_sizes(load):
    function, sizes = lambda x: x.sum(2) * 2, {0: Dim("rows", min=1), 2: Dim("length", min=1)}
    module = load(function, torch.randn(2, 1, 6, 4)[:, :, 1:], dynamic_shapes=(sizes,), target="auto")
    for x in (torch.randn(3, 1, 6, 4)[:, :, 1:], torch.randn(1, 1, 7, 4), torch.randn(3, 1, 9, 8)[:, :, 1:6, ::2]):
        assert torch.equal(module(x), function(x))


def test_size_that_equals_a_stride_of_another_input_stays_dynamic(load):
    sizes = ({0: Dim("rows", min=1)}, {0: Dim("others", min=1)})
    x = torch.randn(2, 6, 5)[:, 1:]
    module = load(lambda x, y: x.sum() + y, x, torch.randn(x.stride(0)), dynamic_shapes=sizes, target="auto")
    for rows, others in ((3, 30), (2, 7), (4, 1)):
        x, y = torch.randn(rows, 6, 5)[:, 1:], torch.randn(others)
        assert torch.equal(module(x, y), x.sum() + y)


def contiguous_and_written(x):
    y = x.contiguous()
    y.mul_(3)
    return y, x + 1, x


@pytest.mark.parametrize("shape", [(4, 6), (6, 4)], ids=["copied_nothing", "copied"])
def test_contiguous_copies_in_the_calls_in_which_it_would(load, shape):
    def made(shape):
        return torch.ones(shape) if shape == (4, 6) else torch.ones(shape).t()

    module = load(contiguous_and_written, made(shape))
    for called in ((4, 6), (6, 4)):
        x, twin = made(called), made(called)
        got, expected = module(x), contiguous_and_written(twin)
        assert all(torch.equal(a, b) for a, b in zip((*got, x), (*expected, twin), strict=True))
        assert [value is x for value in got] == [value is twin for value in expected]


def moved_and_written(x):
    x.unsqueeze_(0)
    x.add_(1)
    return x.sum()


def test_views_of_one_array_are_seen_to_share_memory(load):
    def doubled(x, y):
        x.mul_(2)
        return x + y

    module, results = load(doubled, torch.ones(4), torch.ones(4), target="portable"), []
    for function in (module, doubled):
        array = numpy.arange(8, dtype=numpy.float32)
        results.append((function(torch.from_numpy(array[:4]), torch.from_numpy(array[2:6])), torch.from_numpy(array)))
    torch.testing.assert_close(*results)


def test_input_that_begins_elsewhere_in_its_storage_is_written_in_its_place(load):
    module = load(moved_and_written, torch.randn(3, 4))
    bases = torch.arange(24.0).reshape(2, 3, 4), torch.arange(24.0).reshape(2, 3, 4)
    views = bases[0][1], bases[1][1]
    assert module(views[0]) == moved_and_written(views[1])
    assert torch.equal(*bases)
    assert (views[0].shape, views[0].storage_offset()) == (views[1].shape, views[1].storage_offset())


def by_layout(x):
    return x + 1 if x.is_contiguous() else x - 1


def test_call_in_another_layout_is_refused_where_python_read_it(load):
    module = load(by_layout, torch.randn(4, 6))
    with pytest.raises(CallInvalid, match=r"expected strides \(6, 1\) and storage offset 0"):
        module(torch.randn(6, 4).t())


def in_a_package(name):
    """Return `by_layout` as code of an installed package."""
    names = {}
    file = Path(torch.__file__).parents[1] / name / "layers.py"
    exec(compile(inspect.getsource(by_layout), str(file), "exec"), names)
    return names["by_layout"]


@pytest.mark.parametrize("package", ["torchvision", "torch_geometric"])
def test_code_of_a_package_that_is_named_like_torch_counts_as_the_models(load, package):
    module = load(in_a_package(package), torch.randn(4, 6))
    with pytest.raises(CallInvalid, match="since the model's code reads the layout of tensors"):
        module(torch.randn(6, 4).t())


@pytest.mark.parametrize(
    ("function", "served"),
    [
        (lambda x: x * (2 if x.is_leaf else 3), False),
        (lambda x: x * (2 if x.grad_fn is None else 3), False),
        (lambda x: x * (2 if x.requires_grad else 3), True),
    ],
    ids=["is_leaf", "grad_fn", "requires_grad"],
)
def test_argument_with_a_history_is_refused_where_python_read_that_it_had_none(load, function, served):
    module = load(function, leaf(4))

    if served:
        x = leaf(4) * 1
        assert torch.equal(module(x), function(x))
        return
    with pytest.raises(CallInvalid, match="`x`: expected is_leaf=True, as at capture"):
        module(leaf(4) * 1)


@pytest.mark.parametrize("asks", [lambda x: torch.is_inference_mode_enabled(), lambda x: x.is_inference()])
def test_call_in_inference_mode_is_refused_where_the_code_asks_for_it(load, asks):
    module = load(lambda x: x * 2 if asks(x) else x * 3, torch.ones(3))
    assert torch.equal(module(torch.ones(3)), torch.full((3,), 3.0))
    with torch.inference_mode(), pytest.raises(CallInvalid, match="asks whether it is on"):
        module(torch.ones(3))


def checked(x):
    torch._assert_async(x.sum() < 1e9)
    return x * 2


@pytest.mark.parametrize("target", ["portable", "autograd"])
def test_asserts_on_values_hold_in_both_graphs(load, target):
    module = load(checked, torch.ones(3), target=target)
    with pytest.raises(RuntimeError, match="Expected Tensor with single nonzero value"):
        module(torch.ones(3) + 1e10)
