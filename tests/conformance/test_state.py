"""State of the model, and what its code keeps outside of its tensors."""

import copy
import functools
import random
import re

import pytest
import torch
from torch import nn

import aotexport
import aotexport_runtime
from aotexport_runtime import NotSupported
from tests.conformance.models import leaf, linear
from tests.models import module
from tests.refusals import refusal


def scaled():
    """Multiplies by a number that Python reads from a buffer."""
    return module(lambda self, x: x * int(self.n), n=torch.tensor(3))


def test_number_read_from_a_buffer_follows_the_buffer(load):
    module = load(scaled(), torch.ones(4))
    module.n.fill_(2)
    assert torch.equal(module(torch.ones(4)), torch.full((4,), 2.0))


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.second.weight = self.first.weight

    def forward(self, x):
        return self.second(self.first(x))


def test_untied_weights_are_neither_called_nor_saved_nor_copied(load, tmp_path):
    module = load(Tied(), torch.ones(2, 4))
    module.second.weight = nn.Parameter(torch.ones(4, 4))
    message = "`first.weight`, `second.weight` are one tensor in the programs, and no longer are in the module"
    for called in (module, copy.deepcopy(module)):
        assert refusal(NotSupported, called, torch.ones(2, 4)) == message
    with pytest.raises(NotSupported, match=r"`first\.weight`, `second\.weight` are one tensor in the programs"):
        aotexport_runtime.save(module, tmp_path / "saved")


def test_hooks_on_parameters_are_refused_at_export(tmp_path):
    net = linear()
    net[0].weight.register_hook(lambda gradient: gradient * 2)
    with pytest.raises(aotexport.ExportFailed, match=r"`0\.weight` has hooks, which a bundle cannot hold"):
        aotexport.export(net, (torch.randn(4, 3),), output=tmp_path / "bundle")


_TABLES = {}


_COUNT = {"calls": 0}


@functools.lru_cache
def remembered(count):
    return torch.arange(count).float()


class Remembering(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)

    @functools.lru_cache  # noqa: B019
    def scale(self, count):
        return torch.full((count,), 2.0)

    def forward(self, x):
        if len(x) not in _TABLES:
            _TABLES[len(x)] = torch.arange(len(x)).float()
        return self.linear(x) + remembered(len(x))[:, None] * _TABLES[len(x)][:, None] * self.scale(len(x))[:, None]


def test_tensors_that_code_remembers_are_those_of_the_graph(load):
    net, x = Remembering(), torch.randn(4, 3)
    module = load(net, x, verify=True)
    assert torch.equal(module(x), net(x))
    assert remembered(4).tolist() == [0, 1, 2, 3]


def test_tensors_that_a_call_stores_outside_of_the_module_are_told_and_the_places_left_alone(load, tmp_path):
    last, by_name = [], {"inputs": []}

    class Logging(nn.Module):
        means = []

        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(3, 3)
            self.linear.register_forward_hook(lambda module, args, result: _TABLES.update(result=result.detach()))

        def forward(self, x):
            self.means.append(x.mean())
            last.append(x)
            by_name["inputs"].append(x)
            Logging.size = x.shape[0]
            return self.linear(x)

    load(Logging(), torch.ones(3))
    notes = [note.text for note in aotexport_runtime.open_bundle(tmp_path / "bundle").program("infer").notes]
    assert (_TABLES.get("result"), Logging.means, last, by_name) == (None, [], [], {"inputs": []})
    assert not hasattr(Logging, "size")
    assert {note for note in notes if "outside of the module" in note} == {
        f"the call stores {what}, outside of the module; a call of the bundle does not"
        for what in (
            *(f"a tensor in `{name}`" for name in ("_TABLES['result']", "Logging.means[0]", "last[0]")),
            "a tensor in `by_name['inputs'][0]`",
            "a number in `Logging.size`",
        )
    }


def counting(x):
    _COUNT["calls"] += 1
    return x * _COUNT["calls"]


class CountingInTheClass(nn.Module):
    calls = 0

    def forward(self, x):
        CountingInTheClass.calls += 1
        return x * CountingInTheClass.calls


def by_chance(x):
    return x * random.random()


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (counting, "the call changes the number `_COUNT['calls']`, which is in no module, and a bundle has no other"),
        (
            CountingInTheClass(),
            "the call changes the number `CountingInTheClass.calls`, which is in no module, and a bundle has no other",
        ),
        (by_chance, "the call draws from Python's `random`, and a bundle draws from torch's default generator alone"),
        (lambda x: x * torch.initial_seed(), "the model calls `torch.initial_seed`, which a bundle cannot hold"),
    ],
)
def test_what_is_another_number_in_every_call_is_refused(load, function, reason):
    with pytest.raises(aotexport.ExportFailed, match=re.escape(reason)):
        load(function, torch.ones(3))


class Activations(dict):
    """A table that makes what it is asked for, as model libraries have them in globals."""

    def __getitem__(self, name):
        return super().__getitem__(name)()

    def __iter__(self):
        yield from ()


ACTIVATIONS = Activations(tanh=nn.Tanh)


def test_global_table_that_makes_what_it_is_asked_for_stays_as_it_is(load):
    def activated(x):
        return ACTIVATIONS["tanh"](x)

    x = leaf(3)
    assert torch.equal(load(activated, leaf(3))(x), x.tanh())
    assert dict.__getitem__(ACTIVATIONS, "tanh") is nn.Tanh


def test_state_that_was_computed_before_the_call_is_refused_where_gradients_are_asked_for(tmp_path):
    module = nn.Linear(3, 3)
    module.doubled = module.weight * 2
    module.forward = lambda x: x @ module.doubled
    with pytest.raises(aotexport.ExportFailed, match="`doubled` was computed from other tensors before the call"):
        aotexport.export(module, (torch.randn(2, 3),), output=tmp_path / "bundle", verify=False)
    aotexport.export(module, (torch.randn(2, 3),), output=tmp_path / "bundle", programs=("infer",))


def test_gradients_between_buffers_of_one_memory_are_refused(tmp_path, load):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))
            self.register_buffer("rows", torch.ones(2, 3))
            self.register_buffer("row", self.rows[0])
            self.scale = lambda: self.weight

        def forward(self, x):
            self.rows.mul_(self.scale())
            return self.row * x * self.weight

    net, x = Net(), torch.randn(3)
    with pytest.raises(
        aotexport.ExportFailed, match="writes values that require grad to `rows`, and uses `row`, which"
    ):
        aotexport.export(net, (x,), output=tmp_path / "bundle", verify=False)
    net.scale = lambda: 2.0
    torch.testing.assert_close(load(net, x, verify=True)(x), copy.deepcopy(net)(x))
