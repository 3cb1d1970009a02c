"""Objects that a model does not use, whose code raises or answers everything, wherever the exporter comes by them."""

import sys
from types import ModuleType, SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch
from torch import nn
from torch.export import Dim


def _raise(*args, **kwargs):
    raise RuntimeError("the code of this object cannot run")


_METHODS = ("eq", "ne", "hash", "len", "bool", "iter", "contains", "getitem", "repr", "str", "call")
Proxy = type("Proxy", (), {f"__{name}__": _raise for name in ("getattr", *_METHODS)} | {"__class__": property(_raise)})
Descriptor = type("Descriptor", (), {"__get__": _raise})
LazyModule = type("LazyModule", (ModuleType,), {"__getattr__": _raise})
_ITEMS = {f"__{name}__": _raise for name in ("iter", "len", "bool", "eq", "getitem")}
LazyDict = type("LazyDict", (dict,), _ITEMS | dict.fromkeys(("keys", "values", "items"), _raise))
LazyList = type("LazyList", (list,), _ITEMS)


class AttrDict(dict):
    def __getattr__(self, name):
        return self[name]


OBJECTS = {
    "proxy": Proxy,
    "mock": MagicMock,
    "attr_dict": AttrDict,
    "dict": lambda: LazyDict(a=1),
    "list": lambda: LazyList([1]),
    "module": lambda: LazyModule("lazy"),
    "descriptor": Descriptor,
}


def _model(thing):
    """Return a model of this module with `thing` wherever its code, state or namespace can hold it."""

    class Model(nn.Module):
        shared = thing

        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)
            vars(self)["thing"] = thing
            self.things = [thing, (thing, {"thing": thing}), SimpleNamespace(thing=thing)]

        def __getattr__(self, name):
            try:
                return super().__getattr__(name)
            except AttributeError:
                raise KeyError(name) from None

        def forward(self, x, *, other=None):
            y = self.scaled(x)
            y.register_hook(self.of_gradient)
            return y

        def scaled(self, x, first=thing, *, second=thing):
            return thing.first if x.dim() == 7 else self.linear(x) * x.shape[0]

        def of_gradient(self, grad):
            return thing if grad.dim() == 7 else grad * 2

    return Model()


@pytest.mark.parametrize("kind", OBJECTS)
def test_unused_objects_whose_code_cannot_run_are_left_alone(kind, load, monkeypatch):
    thing, here = OBJECTS[kind](), sys.modules[__name__]
    monkeypatch.setattr(here, "THING", thing, raising=False)
    monkeypatch.setattr(here, "THINGS", {"thing": thing, "more": [thing]}, raising=False)
    model, x = _model(thing), torch.randn(3, 4, requires_grad=True)
    dynamic = ({0: Dim("batch")},)
    loaded = load(model, x, programs="train", dynamic_shapes=dynamic, target="auto")
    for rows in (2, 5):
        x = torch.randn(rows, 4, requires_grad=True)
        outputs = [module(x) for module in (model, loaded)]
        torch.testing.assert_close(*outputs)
        torch.testing.assert_close(*[torch.autograd.grad(output.sum(), x) for output in outputs])
