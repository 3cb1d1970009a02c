"""What Python shows of a loaded module: the model's name, and the signatures of its methods."""

import inspect

import pytest
import torch
from torch import nn

import aotexport
from aotexport_runtime import NotSupported
from aotexport_runtime.module.bundle_module import BundleModule

X = torch.ones(3)


def plain(x, scale=2.0):
    return x * scale


def kinds(x, /, y, z=None, *, k, m=True, n="sum"):
    return x + y + k if z is None else x


def labelled(x, mask=None, labels=None, hidden=()):
    return x if labels is None else x * labels


def open_ended(*args, **kwargs):
    return args[0] + kwargs["shift"]


class WithAttributes(nn.Module):
    main_input_name = "pixels"

    def __init__(self):
        super().__init__()
        self.loss_type, self.gain, self.config, self.source = "Mean", 2, {"layers": 1}, "models/file"

    @property
    def computed(self):
        raise AssertionError("an export runs no properties")

    def forward(self, x):
        return x * self.gain


class WithMethods(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.calls = 0

    def forward(self, x):
        self.calls = self.calls + 1
        return self.decode(self.encode(x)) + self.calls

    def encode(self, x, *, gain=1.5):
        return self.linear(x) * gain

    def decode(self, code):
        return code * 2


ROWS = {
    "default": (plain, (X,), {}, "(x, scale=2.0)"),
    "default passed": (plain, (X, X), {}, "(x, scale=2.0)"),
    "kinds": (kinds, (X, X), {"k": X, "n": "mean"}, "(x, /, y, z=None, *, k, m=True, n='sum')"),
    "optional before passed": (labelled, (X,), {"labels": X}, "(x, mask=None, labels=None, hidden=())"),
    "default unknown": (labelled, (X, None, X, (X,)), {}, "(x, mask=None, labels=None, hidden=Ellipsis)"),
    "star": (open_ended, (X, X), {"shift": X}, "(*args, shift)"),
    "no name": (open_ended, (X,), {"shift": X, "class": X}, "(*args, shift)"),
    "star empty": (lambda x, *rest, flag=False, **options: x * 2, (X,), {}, "(x, *, flag=False)"),
}


@pytest.mark.parametrize(("function", "args", "kwargs", "shown"), ROWS.values(), ids=ROWS)
def test_forward_has_the_captured_signature(load, function, args, kwargs, shown):
    module = load(function, *args, kwargs=kwargs, target="auto")
    assert str(inspect.signature(module.forward)) == shown
    of_class = inspect.signature(type(module).forward)
    assert next(iter(of_class.parameters)) == "self"
    assert [*of_class.parameters.values()][1:] == [*inspect.signature(module.forward).parameters.values()]


@pytest.mark.parametrize(
    ("function", "more", "shown"),
    [
        (open_ended, {"gain": X}, "(*args, shift, gain=Ellipsis)"),
        (labelled, {"hidden": (X,)}, "(x, mask=None, labels=None, hidden=())"),
    ],
)
def test_parameter_of_some_programs_alone_has_a_default(load, function, more, shown):
    kwargs = {"shift" if function is open_ended else "labels": X}
    programs = [aotexport.Program("more", example=aotexport.Example((X,), {**kwargs, **more})), "infer"]
    module = load(function, X, kwargs=kwargs, programs=programs, target="auto")
    assert str(inspect.signature(module.forward)) == shown


def test_class_is_named_after_the_model_and_is_a_bundle_module(load):
    module = load(WithMethods(), X, programs=["infer"], target="auto")
    assert (type(module).__name__, type(module).__mro__[1]) == ("WithMethods", BundleModule)
    assert repr(module).startswith("BundleModule(\n  WithMethods, programs: infer")
    assert isinstance(module.twin(), type(module))


def test_methods_have_their_signatures_and_results(load):
    model = WithMethods()
    programs = [aotexport.Program("encode", method="encode", example=(X,)), "infer"]
    module = load(model, X, programs=programs, target="auto").eval()
    assert str(inspect.signature(module.encode)) == "(x, *, gain=1.5)"
    assert str(inspect.signature(module.forward)) == "(x)"
    assert torch.equal(module.encode(X), model.encode(X))
    assert not hasattr(module, "decode")
    with pytest.raises(NotSupported, match="no call looks at the attribute `decode` of the loaded module"):
        module.decode = abs


def test_plain_attributes_of_the_model_are_read(load):
    module = load(WithAttributes(), X, programs=["infer"], target="auto")
    assert (module.loss_type, module.main_input_name, module.gain) == ("Mean", "pixels", 2)
    assert not any(hasattr(module, name) for name in ("config", "source", "computed"))
