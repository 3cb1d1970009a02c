"""Attributes of modules that calls set: constants where the first call sets them for good, else arguments."""

import collections
import copy

import pytest
import torch
from torch import nn

import aotexport
import aotexport_runtime
from aotexport.errors import ExportFailed


class Prepared(nn.Module):
    def __init__(self, scale=1.0):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([1.0, 2.0, 3.0]))
        self.part = nn.Module()
        self.part.prepared_for = "nothing"
        self.scale = scale

    def forward(self, x):
        mode = "training" if self.training else "inference"
        if self.part.prepared_for != mode:
            with torch.no_grad():
                self.weight.mul_(self.scale)
            self.part.prepared_for = mode
        return x * self.weight


def test_attribute_that_changes_nothing_else_is_a_constant(tmp_path):
    model, x = Prepared(), torch.randn(2, 3)
    report = aotexport.export(model, (x,), output=tmp_path / "bundle")
    assert model.part.prepared_for == "nothing"
    assert list(map(str, report.notes)) == [
        f"the first call sets the attribute `part.prepared_for` of the model to '{mode}', which changes nothing else: "
        "the bundle does what later calls do"
        for mode in ("training", "inference")
    ]
    loaded = aotexport_runtime.load(tmp_path / "bundle")
    version = loaded.weight._version
    torch.testing.assert_close(loaded(x), x * model.weight)
    assert loaded.weight._version == version


class Caching(nn.Module):
    """Keeps what its first call computes of the weights, when they have changed too."""

    def __init__(self):
        super().__init__()
        self.weight, self.memo = nn.Parameter(torch.tensor([1.0, 2.0])), {}

    def forward(self, x):
        if "scale" not in self.memo:
            self.memo["scale"] = [self.weight.detach() * 3]
        return x * self.memo["scale"][0] + self.weight


def test_what_the_first_call_computes_of_the_weights_is_kept(load):
    model, x = Caching(), torch.ones(2)
    loaded = load(copy.deepcopy(model), x, programs=("train",), target="auto")
    for _ in range(3):
        torch.testing.assert_close(loaded(x), model(x))
        for module in (loaded, model):
            with torch.no_grad():
                module.weight.mul_(0.5)


def test_attribute_that_tells_calls_apart_is_kept(load):
    model = Prepared(scale=2.0)
    loaded = load(model, torch.ones(2, 3), target="auto")
    for function in (model, loaded):
        function.train()
    for _ in range(3):
        x = torch.randn(2, 3)
        torch.testing.assert_close(loaded(x), model(x))


class Stateful(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.calls, self.last, self.cache, self.table = 0, None, [], {"sum": torch.zeros(3), "n": 0}


class Counting(Stateful):
    def forward(self, x):
        self.calls += 2
        self.table["n"] += 1
        return self.linear(x) * self.calls / self.table["n"] if self.calls % 4 else x, self.calls


class Remembering(Stateful):
    def forward(self, x):
        x = x if self.last is None else x + self.last
        self.table["sum"] = self.table["sum"] + x
        self.last = self.linear(x).detach()
        return self.last, self.table["sum"] * 2


class Growing(Stateful):
    def forward(self, x):
        self.cache.append(x * 2)
        return torch.stack(self.cache).sum(0)


class Smoothing(Stateful):
    """Gives the same for the same inputs, however often they come."""

    def __init__(self):
        super().__init__()
        self.means = collections.deque(maxlen=2)

    def forward(self, x):
        self.means.append(x.mean())
        return self.linear(x) + sum(self.means) / len(self.means)


class ReadingLate(Stateful):
    def forward(self, x):
        self.cache.append(x)
        return x + self.cache[-3] if len(self.cache) > 3 else x * 2


class Resetting(nn.Module):
    """Begins every call with a number where the last one left a tensor."""

    def __init__(self):
        super().__init__()
        self.potentials = {"v": 0.0}

    def forward(self, x):
        self.potentials["v"] = 0.0
        for row in x.unbind(1):
            self.potentials["v"] = self.potentials["v"] * 0.5 + row
        return self.potentials["v"] * 2


def test_item_that_each_call_begins_with_is_no_state(load):
    model, sizes = Resetting(), ({0: torch.export.Dim("batch", min=1, max=64)},)
    loaded = load(model, torch.randn(4, 3), dynamic_shapes=sizes, verify=True, target="auto")
    for rows in (4, 1, 7):
        x = torch.randn(rows, 3)
        assert torch.equal(loaded(x), model(x))


@pytest.mark.parametrize("model", [Counting, Remembering, Growing, Smoothing, ReadingLate])
def test_attributes_are_kept_from_call_to_call(tmp_path, model):
    eager = model()
    aotexport.export(eager, (torch.randn(3),), output=tmp_path / "bundle", programs=("infer",), verify=False)
    for target in ("portable", "autograd"):
        loaded = aotexport_runtime.load(tmp_path / "bundle", target=target)
        follows(loaded, copy.deepcopy(eager).eval(), model is Counting)


def follows(loaded, eager, counts):
    """Compare five calls."""
    with torch.no_grad():
        for _ in range(5):
            x = torch.randn(3)
            torch.testing.assert_close(loaded(x), eager(x))
    assert (loaded.calls if counts else eager.calls) == eager.calls


class Averaging(Stateful):
    def forward(self, x):
        self.calls += 1
        x = self.linear(x)
        mean = x.detach().mean(0)
        self.last = mean if self.last is None else 0.9 * self.last + 0.1 * mean
        return (x - self.last) * min(1.0, self.calls / 3)


def test_attributes_are_kept_through_modes_and_sizes_and_the_exported_model_is_left_alone(load):
    model, batch = Averaging(), torch.export.Dim("batch", min=1, max=8)
    loaded = load(model, torch.randn(5, 3), dynamic_shapes=({0: batch},), target="auto")
    assert (model.calls, model.last) == (0, None)
    for number in range(6):
        x = torch.randn(number + 1, 3)
        seen = []
        for module in (loaded.train(number % 3 > 0), model.train(number % 3 > 0)):
            result = module(x)
            result.square().sum().backward()
            seen.append((result, *(parameter.grad for parameter in module.parameters())))
        torch.testing.assert_close(*seen)


def test_state_that_was_not_followed_is_refused_by_name(load):
    loaded, x = load(Growing(), torch.randn(3), programs=("infer",), target="auto"), torch.randn(3)
    twin = loaded.twin()
    for _ in range(9):
        loaded(x)
    with pytest.raises(
        aotexport_runtime.CallInvalid, match=r"`self\['cache'\]`: expected a list of 8, got a list of 9"
    ):
        loaded(x)
    torch.testing.assert_close(twin(x), x * 2)


class Unkept(Stateful):
    def forward(self, x):
        self.cache[0] = lambda: x
        return x


def test_attribute_that_no_bundle_can_keep_is_refused(tmp_path):
    model = Unkept()
    model.cache.append(torch.sin)
    with pytest.raises(ExportFailed) as caught:
        aotexport.export(model, (torch.randn(3),), output=tmp_path / "bundle", programs=("infer",))
    assert str(caught.value) == (
        "the call changes `cache[0]` of the model, and a bundle has no Python state. Keep tensors as buffers "
        "(`register_buffer`) and change them in place; count and collect outside of the call. They cannot be kept: "
        "input `self['cache'][0]` is a `builtins.builtin_function_or_method`, which a bundle cannot hold. Pass "
        "tensors, numbers, strings, None, or tuples, lists, dicts, named tuples or dataclasses of them"
    )


class Part(Stateful):
    def forward(self, x):
        self.calls += 1
        x = self.linear(x)
        # Two views of one tensor, and one that is laid out otherwise.
        both = torch.stack([x, x * 2]).detach() if self.last is None else self.last[0].t() + x
        self.last = (both.t(), both)
        return (x + both).sum() * self.calls


class Whole(Stateful):
    def __init__(self):
        super().__init__()
        self.part = Part()

    def forward(self, x):
        self.table["n"] += 1
        self.table["sum"] = self.table["sum"] + self.part(x)
        return self.table["sum"] * self.table["n"]


def test_saved_bundle_goes_on_where_the_module_was(tmp_path, load):
    eager = Whole().eval()
    loaded = load(eager, torch.ones(3), programs=("infer",), target="auto")
    with torch.no_grad():
        for number in range(3):
            for _ in range(2):
                x = torch.randn(3)
                torch.testing.assert_close(loaded(x), eager(x))
            saved = aotexport_runtime.save(loaded, tmp_path / f"saved{number}")
            loaded = aotexport_runtime.load(saved)
            assert loaded.part.calls == eager.part.calls == 2 * number + 2
            turned, both = loaded.part.last
            assert (turned.stride(), turned.data_ptr()) == ((1, 3), both.data_ptr())
        aotexport_runtime.selftest(saved)
        for module in (loaded, eager):
            module.part.calls, module.part.last = 0, None
        torch.testing.assert_close(loaded(x), eager(x))
    assert list(loaded.state_dict()) == list(eager.state_dict())


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (lambda module: module.linear.weight[0], "the attribute `last` shares memory with `linear.weight`, and would"),
        (lambda module: torch.ones(3).to_sparse(), "the attribute `last` is a `Tensor` of layout torch.sparse_coo on"),
        (lambda module: torch.sin, "`last` is a `builtin_function_or_method`, which a bundle cannot hold"),
    ],
    ids=["view of a weight", "sparse", "function"],
)
def test_attribute_that_cannot_be_saved_is_refused_by_name(tmp_path, value, message, load):
    loaded = load(Remembering(), torch.ones(3), programs=("infer",), target="auto")
    loaded.last = value(loaded)
    with pytest.raises(aotexport_runtime.NotSupported) as caught:
        aotexport_runtime.save(loaded, tmp_path / "saved")
    assert str(caught.value).startswith(message)


class Scaled:
    """An object that no argument can be."""

    def __init__(self):
        self.scale, self.function = None, lambda value: value


class SmoothingInAnObject(Stateful):
    def __init__(self):
        super().__init__()
        self.kept = Scaled()

    def forward(self, x):
        self.kept.scale = x.mean() if self.kept.scale is None else (self.kept.scale + x.mean()) / 2
        return x + self.kept.scale


def test_read_attribute_that_no_argument_can_be_is_refused(tmp_path):
    with pytest.raises(ExportFailed, match="the call stores what later calls read in `kept` of the model"):
        aotexport.export(SmoothingInAnObject(), (torch.ones(3),), output=tmp_path / "bundle", programs=("infer",))
