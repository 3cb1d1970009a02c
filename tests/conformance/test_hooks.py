"""Hooks of the model: calls unlike the captured one, equal to eager, and what no bundle holds, refused by name."""

import pytest
import torch
from torch import nn

import aotexport
import aotexport_runtime
from aotexport import ExportFailed
from aotexport_runtime import CallInvalid, NotSupported
from tests import models
from tests.refusals import refusal


def leaf():
    torch.manual_seed(0)
    return torch.randn(3, 4, requires_grad=True)


def clipping(x):
    hidden, other = x * 2, x * 5
    hidden.register_hook(lambda grad: grad**2 + 1)
    other.register_hook(torch.ones_like)
    return hidden.sin(), hidden.cos(), other, x.exp()


def scaling(x):
    hidden, other = x * 2, x * 5
    hidden.register_hook(lambda grad: grad * 3 - grad / 2)
    other.register_hook(torch.neg)
    return hidden.sin(), hidden.cos(), other, x.exp()


@pytest.fixture(scope="module", params=[clipping, scaling], ids=["clipping", "scaling"])
def exported(request, new_bundle):
    """Return a model and its bundle."""
    return request.param, new_bundle(request.param, leaf())


@pytest.mark.parametrize("target", ["portable", "autograd"])
@pytest.mark.parametrize("used", [(0,), (3,), (1, 2), (0, 1, 2, 3)])
def test_hooks_of_the_outputs_that_backward_starts_from_are_called(exported, target, used):
    model, bundle = exported
    gradients = []
    for function in (aotexport_runtime.load(bundle, target=target), model):
        x = leaf()
        outputs = function(x)
        sum(outputs[index].sum() for index in used).backward()
        gradients.append(x.grad)
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("target", ["portable", "autograd"])
def test_hook_differentiated_twice_equals_eager(exported, target):
    model, bundle = exported
    found = []
    for function in (aotexport_runtime.load(bundle, target=target), model):
        x = leaf()
        (first,) = torch.autograd.grad(function(x)[0].square().sum(), x, create_graph=True)
        found += [(first, *torch.autograd.grad(first.sin().sum(), x))]
    torch.testing.assert_close(*found)


class _Keeper:
    def __init__(self):
        self.seen = []

    def append(self, grad):
        self.seen.append(grad)


def _counted():
    count = 0

    def hook(grad):
        nonlocal count
        count += 1
        return grad * count

    return hook


STATE = (
    "and a bundle has no Python state. Register it on what the loaded bundle takes and returns, or write to buffers in "
    "place"
)


def hooked(hook):
    def model(x):
        hidden = x * 2
        hidden.register_hook(hook)
        return hidden

    return model


class HookedOnItsParameter(nn.Linear):
    def forward(self, x):
        self.weight.register_hook(torch.neg)
        return super().forward(x)


def retaining(x):
    hidden = x * 2
    hidden.retain_grad()
    return hidden, hidden.sin()


def hooked_node(x):
    hidden = x * 2
    hidden.grad_fn.register_hook(lambda *grads: None)
    return hidden.sin()


REFUSED = {
    "list": (hooked(_Keeper().append), f"a hook of the model changes `self.seen[0]`, {STATE}"),
    "nonlocal": (hooked(_counted()), f"a hook of the model changes `count`, {STATE}"),
    "parameter": (
        HookedOnItsParameter(4, 4),
        "the model registers a hook on its own `weight` in the call, and every call would add one. Register it on the "
        "loaded module's parameter",
    ),
    "retained": (
        retaining,
        "the model calls `retain_grad` on what it returns, which a bundle cannot hold. Call it on what the loaded "
        "module returns",
    ),
    "node": (
        hooked_node,
        "the model calls `Node.register_hook`, which a bundle cannot hold. Register hooks on tensors instead",
    ),
}
WITHOUT_A_LINE = ("parameter", "retained")


@pytest.mark.parametrize("name", REFUSED)
def test_hook_that_a_bundle_cannot_hold_is_refused_with_its_line(tmp_path, name):
    model, reason = REFUSED[name]
    if name not in WITHOUT_A_LINE:
        code = model.__code__
        reason = f"{__file__}:{code.co_firstlineno + 2}: in {code.co_name}: {reason}"
    assert refusal(ExportFailed, aotexport.export, model, (leaf(),), output=tmp_path / "bundle", verify=False) == reason


@pytest.mark.parametrize("register", ["register_full_backward_hook", "register_full_backward_pre_hook"])
def test_backward_hook_of_a_module_is_refused_where_gradients_are_asked_for(tmp_path, register):
    module = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    getattr(module[1], register)(lambda *grads: None)
    with pytest.raises(ExportFailed, match="`1` has backward hooks"):
        aotexport.export(module, (leaf(),), output=tmp_path / "bundle", verify=False)
    aotexport.export(module, (leaf(),), output=tmp_path / "bundle", programs=("infer",))


def slope(x):
    return torch.autograd.grad(x.sin().sum(), x, create_graph=True)[0]


LEAF, NO_LEAF = leaf(), leaf() * 1


@pytest.mark.parametrize("target", ["portable", "autograd"])
@pytest.mark.parametrize("hang", [lambda x: x.register_hook(torch.neg), torch.Tensor.retain_grad])
def test_hook_on_what_the_model_takes_gradients_of_is_refused_by_the_call(bundle_of, target, hang):
    module = aotexport_runtime.load(bundle_of(slope, NO_LEAF), target=target)
    x = leaf() * 1
    hang(x)
    assert refusal(CallInvalid, module, x) == (
        "the call does not fit program `train`:\n"
        "  - `x`: expected neither hooks nor a retained gradient: the model takes gradients with regard to it, and "
        "eager would call them in the call, which a graph does not; pass a view of it, which has none"
    )
    assert torch.equal(module(x.view_as(x)), x.cos())


def test_hook_of_a_parameter_that_a_backward_does_not_come_to_is_not_called(new_bundle):
    def both(self, x):
        return self.first(x), self.second(x)

    bundle = new_bundle(models.module(both, first=nn.Linear(4, 2), second=nn.Linear(4, 2)), leaf())
    for target in ("portable", "autograd"):
        module = aotexport_runtime.load(bundle, target=target)
        called = []
        for name, parameter in module.named_parameters():
            parameter.register_hook(lambda grad, name=name, called=called: called.append(name))
        module(leaf())[0].sum().backward()
        assert sorted(called) == ["first.bias", "first.weight"]


def hang_a_hook(output):
    output.register_hook(lambda grad: None if grad is None else grad * 2)


def features_and_scores(x):
    features = (x * 2).tanh()
    return features, features.sin()


@pytest.mark.parametrize("hang", [hang_a_hook, torch.Tensor.retain_grad])
def test_what_hangs_on_an_output_of_which_another_is_computed_is_served_by_the_nodes_alone(bundle_of, hang):
    def gradient(function, of):
        x = leaf()
        outputs = function(x)
        hang(outputs[0])
        sum(outputs[i].sum() for i in of).backward()
        return x.grad

    bundle = bundle_of(features_and_scores, LEAF)
    nodes, joint = (aotexport_runtime.load(bundle, target=target) for target in ("autograd", "portable"))
    for of in ([0], [1], [0, 1]):
        assert torch.equal(gradient(nodes, of), gradient(features_and_scores, of))
    assert torch.equal(gradient(joint, [0]), gradient(features_and_scores, [0]))
    for of in ([1], [0, 1]):
        with pytest.raises(NotSupported, match=r"`output\[0\]` has a hook or retains its gradient"):
            gradient(joint, of)


def views_of_a_view_of_a_result(x):
    view = (x * 2).t()
    return view[0][:1], view, view[0], view.exp().sum(), x.cos()


def views_of_a_view_of_an_input(x):
    view = x.t()
    return view, x.t()[1], view[0], x.cos()


@pytest.mark.parametrize("hang", [hang_a_hook, torch.Tensor.retain_grad])
@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("function", [views_of_a_view_of_a_result, views_of_a_view_of_an_input])
def test_output_that_is_a_view_has_the_gradients_of_its_views(bundle_of, function, which, hang):
    seen = []
    for model in (function, aotexport_runtime.load(bundle_of(function, LEAF), target="portable")):
        x = leaf()
        outputs = [output for output in model(x) if output.dim()]
        hang(outputs[which])
        torch.autograd.backward(outputs, [torch.ones_like(output) for output in outputs])
        seen.append((x.grad, outputs[which].grad if outputs[which].retains_grad else None))
    torch.testing.assert_close(seen[1], seen[0])


def rounds_what_it_saves(x):
    with torch.autograd.graph.saved_tensors_hooks(lambda saved: saved.half(), lambda saved: saved.float()):
        return x.exp()


def saves_elsewhere(x):
    with torch.autograd.graph.save_on_cpu():
        return x.exp()


def test_hooks_on_saved_tensors_are_refused_where_gradients_are_recorded(tmp_path):
    with pytest.raises(aotexport.ExportFailed) as error:
        aotexport.export(rounds_what_it_saves, (leaf(),), output=tmp_path / "a", verify=False)
    assert str(error.value).partition(": in rounds_what_it_saves: ")[2] == (
        "the model calls `torch.autograd.graph.saved_tensors_hooks`, which a bundle cannot hold. Use `save_on_cpu` or "
        "a checkpoint, or write a custom autograd function"
    )
    aotexport.export(rounds_what_it_saves, (leaf().detach(),), output=tmp_path / "b")
    aotexport.export(saves_elsewhere, (leaf(),), output=tmp_path / "c")
