"""Digests of objects: equal for equal content, other ones for every difference that an export may read."""

from __future__ import annotations

import functools
import subprocess
import sys
import threading
import types
import weakref
from collections import OrderedDict, defaultdict, deque
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import nn

from aotexport.cache.digests import NotDigestible, digest_of

HERE = Path(__file__).parent
SCALE = 2.0
NAMES = {"a", "b"}


class Net(nn.Module):
    kind = "net"

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.register_buffer("seen", torch.zeros(2))
        self.options = {"scale": 2.0, "names": ["a", "b"], "set": {"x", "y", "z"}}
        self.act = self.activation(1.5)
        self.back = weakref.ref(self)

    @staticmethod
    def activation(by: float) -> Any:
        return lambda x: torch.relu(x) * by

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.act(self.linear(x)) * SCALE * self.options["scale"]


def net() -> Net:
    torch.manual_seed(0)
    return Net()


def digest(value: Any) -> str:
    return digest_of({"value": value}, HERE)


def test_equal_models_have_equal_digests() -> None:
    assert digest(net()) == digest(net())


def _other_closure(model: Net) -> None:
    model.act = Net.activation(1.25)


def _other_strides(model: Net) -> None:
    model.seen = torch.zeros(4)[::2]


def _shared(model: Net) -> None:
    model.seen = torch.zeros(3, 3)[0, :2]
    model.more = model.seen


def _apart(model: Net) -> None:
    model.seen = torch.zeros(3, 3)[0, :2]
    model.more = torch.zeros(3, 3)[0, :2]


def _tied(model: Net) -> None:
    model.second = nn.Linear(3, 3)
    model.second.weight = model.linear.weight


def _hooked(model: Net) -> None:
    model.linear.register_forward_hook(lambda module, args, result: result + 1)


def _method(model: Net) -> None:
    model.linear.forward = types.MethodType(lambda self, x: x, model.linear)


CHANGES = {
    "weights_in_place": lambda model: model.linear.weight.data[0, 0].add_(1e-7),
    "sign_of_a_zero": lambda model: model.seen.copy_(torch.tensor([0.0, -0.0])),
    "dtype": lambda model: setattr(model, "seen", model.seen.half()),
    "strides": _other_strides,
    "shared_memory": _shared,
    "memory_apart": _apart,
    "tied": _tied,
    "requires_grad": lambda model: model.linear.weight.requires_grad_(False),
    "gradient": lambda model: setattr(model.linear.weight, "grad", torch.ones(3, 3)),
    "training": lambda model: model.eval(),
    "attribute": lambda model: setattr(model, "depth", 1),
    "item": lambda model: model.options.update(scale=3.0),
    "order_of_a_list": lambda model: model.options["names"].reverse(),
    "member_of_a_set": lambda model: model.options["set"].add("w"),
    "type_of_a_number": lambda model: model.options.update(scale=2),
    "closure": _other_closure,
    "hook": _hooked,
    "method_of_an_object": _method,
    "buffer_that_is_not_saved": lambda model: model._non_persistent_buffers_set.add("seen"),
    "attribute_of_a_parameter": lambda model: setattr(model.linear.weight, "sharded", True),
    "subclass_of_a_parameter": lambda model: setattr(
        model.linear, "weight", type("Mine", (nn.Parameter,), {})(model.linear.weight.data)
    ),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_change_of_a_model_changes_its_digest(change: Any) -> None:
    model = net()
    before = digest(model)
    change(model)
    assert digest(model) != before
    assert digest(model) == digest(model)


def test_global_of_the_models_file_is_part_of_the_digest(monkeypatch: pytest.MonkeyPatch) -> None:
    model = net()
    before = digest(model)
    monkeypatch.setitem(globals(), "SCALE", 3.0)
    assert digest(model) != before


def test_attribute_of_the_models_class_is_part_of_the_digest(monkeypatch: pytest.MonkeyPatch) -> None:
    model = net()
    before = digest(model)
    monkeypatch.setattr(Net, "kind", "other")
    assert digest(model) != before


def test_method_put_on_an_installed_class_is_part_of_the_digest(monkeypatch: pytest.MonkeyPatch) -> None:
    def forward(self: nn.Linear, input: torch.Tensor) -> torch.Tensor:
        return input

    before = digest(nn.Linear.forward)
    monkeypatch.setattr(nn.Linear, "forward", forward)
    assert digest(nn.Linear.forward) != before


def test_code_is_part_of_the_digest() -> None:
    def code(text: str) -> Any:
        names: dict[str, Any] = {}
        exec(f"def f(x):\n    return {text}", names)
        return names["f"]

    assert digest(code("x + 1")) == digest(code("x + 1"))
    assert len({digest(code(text)) for text in ("x + 1", "x + 2", "x - 1", "x.a", "x.b", "(lambda: 1)()")}) == 6


BOTH = torch.ones(2)
BASE = numpy.arange(12.0).reshape(3, 4)
PAIRS = {
    "strides_of_an_array": (BASE[:, :2].T.copy().T, BASE[:, :2].copy()),
    "place_in_an_array": (BASE[0:1], BASE[1:2]),
    "array_of_objects": (numpy.array([{"a": 1}], dtype=object), numpy.array([{"a": 2}], dtype=object)),
    "dict_order": ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
    "ordered_dict": (OrderedDict(a=1), {"a": 1}),
    "default_of_a_dict": (defaultdict(int), defaultdict(float)),
    "length_of_a_deque": (deque([1], maxlen=2), deque([1], maxlen=3)),
    "partial": (functools.partial(torch.add, alpha=1), functools.partial(torch.add, alpha=2)),
    "bool_and_int": (True, 1),
    "text_and_bytes": ("a", b"a"),
    "nesting": ([[1], 2], [[1, 2]]),
    "same_twice": ([(one := [1]), one], [[1], [1]]),
    "shared_memory": ([BOTH[:1], BOTH[1:]], [torch.ones(1), torch.ones(1)]),
    "generator": (torch.Generator().manual_seed(1), torch.Generator().manual_seed(2)),
    "sparse": (torch.eye(2).to_sparse(), (2 * torch.eye(2)).to_sparse()),
    "conjugate": (torch.ones(1, dtype=torch.complex64), torch.ones(1, dtype=torch.complex64).conj()),
    "builtin": (torch.sin, torch.cos),
    "operator": (torch.Tensor.sin, torch.Tensor.cos),
    "slice": (slice(1), slice(2)),
}


@pytest.mark.parametrize(("one", "other"), PAIRS.values(), ids=PAIRS)
def test_different_values_have_different_digests(one: Any, other: Any) -> None:
    assert digest(one) == digest(one)
    assert digest(one) != digest(other)


class Holder:
    def __init__(self, value: Any) -> None:
        self.value = value


UNREAD = {
    "open file": lambda: sys.__stderr__,
    "generator": lambda: (each for each in ()),
    "thread": threading.local,
    "computed": lambda: torch.ones(1, requires_grad=True) * 2,
    "meta": lambda: torch.ones(1, device="meta"),
}


@pytest.mark.parametrize("make", UNREAD.values(), ids=UNREAD)
def test_object_that_cannot_be_read_is_refused(make: Any) -> None:
    with pytest.raises(NotDigestible):
        digest(Holder(make()))


def test_refusal_names_the_object() -> None:
    with pytest.raises(NotDigestible) as refusal:
        digest(Holder(each for each in ()))
    assert str(refusal.value) == "an object of `builtins.generator` (TypeError: cannot pickle 'generator' object)"


class BrokenList(list[int]):
    @property
    def __dict__(self) -> Any:
        raise LookupError("no attributes")


def test_error_of_code_of_a_class_is_a_refusal() -> None:
    with pytest.raises(NotDigestible) as refusal:
        digest(BrokenList())
    assert str(refusal.value) == f"an object of `{__name__}.BrokenList` (LookupError: no attributes)"


@pytest.mark.parametrize("name", ["_attributes", "_layout"])
def test_misspelt_name_of_the_exporter_is_no_refusal(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(f"aotexport.cache.digests.{name}")
    with pytest.raises(NameError, match=f"name '{name}' is not defined"):
        digest(net())


SCRIPT = f"""
import sys
sys.path.insert(0, {str(HERE.parents[2])!r})
from tests.unit.exporter.test_digests import digest, net, NAMES
print(digest([net(), NAMES, {{"one", "two", "three", "four"}}]))
"""


def test_digest_is_the_same_in_other_processes() -> None:
    found = [
        subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True).stdout
        for _ in range(2)
    ]
    assert found[0] == found[1] != ""
