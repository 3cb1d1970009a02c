"""Calls with other tensors that require grad than at capture: equal to eager, or refused by name."""

import itertools

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import aotexport
import aotexport_runtime
from aotexport_runtime import CallInvalid, adapters
from tests.cases import functions
from tests.refusals import refusal

pytestmark = pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True")

TARGETS = ("portable", "autograd")
PATTERNS = ["".join(each) for each in itertools.product(("", "x"), ("", "a"), ("", "b"))]
"""Names of what requires grad: the argument and two layers."""


class Layers(nn.Module):
    """Two layers, called by a function of itself and the argument."""

    def __init__(self, run):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.run = run

    def forward(self, x):
        return self.run(self, x)


def reentrant(m, x):
    return checkpoint(m.b, m.a(x).tanh(), use_reentrant=True)


def reentrant_of_the_argument(m, x):
    return checkpoint(m.b, x, use_reentrant=True) * m.a(x)


def reentrant_after_a_region(m, x):
    with torch.no_grad():
        hidden = m.a(x)
    return checkpoint(m.b, hidden, use_reentrant=True) + x


def reads_a_parameter(m, x):
    return m.b(m.a(x)) if m.a.weight.requires_grad else m.b(x) * 2


def reads_a_value(m, x):
    hidden = m.a(x)
    return m.b(hidden) * (2 if hidden.requires_grad else 3)


def counts_what_is_needed(m, x):
    return functions.Counting.apply(x, m.a.bias, m.b.bias) + m.a(x)


def has_no_gradient_of_the_argument(m, x):
    return functions.WithoutGradientOfTheFirst.apply(x, m.a.bias, m.b.bias)


def leaves_out_what_is_not_needed(m, x):
    return functions.LeavingOut.apply(x, m.a.bias, m.b.bias)


def reads_what_always_requires_grad(m, x):
    own = x.detach().clone().requires_grad_()
    return m.b(m.a(x)) * (2 if (own * 2).requires_grad else 3)


def anything(names):
    return True


CASES = [
    (reentrant, "ab", lambda names: "a" in names),
    (reentrant_of_the_argument, "xb", lambda names: "x" in names),
    (reentrant_after_a_region, "ab", anything),
    (reads_a_parameter, "ab", lambda names: "a" in names),
    (reads_a_value, "b", lambda names: "x" not in names and "a" not in names),
    (reads_what_always_requires_grad, "ab", anything),
    (counts_what_is_needed, "xa", lambda names: names == "xa"),
    (leaves_out_what_is_not_needed, "a", anything),
    (has_no_gradient_of_the_argument, "ab", lambda names: "x" not in names),
]
"""What a model runs, what requires grad at capture, and the patterns that a bundle must serve."""


def require(module, names):
    for name in "ab":
        for parameter in module.get_submodule(name).parameters():
            parameter.requires_grad_(name in names)


def gradients(module, x, names):
    """Return the result and all gradients of a call in which these require grad."""
    require(module, names)
    module.zero_grad()
    x = x.clone().requires_grad_("x" in names)
    results = module(x)
    results = results if isinstance(results, tuple) else (results,)
    loss = sum(result.square().sum() for result in results)
    if loss.requires_grad:
        loss.backward()
    return [*results, x.grad, *(parameter.grad for parameter in module.parameters())]


def exported(tmp_path, run, names):
    torch.manual_seed(0)
    module = Layers(run)
    require(module, names)
    aotexport.export(module, (torch.randn(3, 4).requires_grad_("x" in names),), output=tmp_path / "b", verify=False)
    return module


@pytest.mark.parametrize(("run", "captured", "served"), CASES, ids=lambda each: getattr(each, "__name__", each))
def test_call_with_another_pattern_of_requires_grad_equals_eager_or_is_refused(tmp_path, run, captured, served):
    module = exported(tmp_path, run, captured)
    for target in TARGETS:
        loaded = aotexport_runtime.load(tmp_path / "b", target=target)
        for names in PATTERNS:
            x = torch.randn(3, 4)
            if not served(names):
                with pytest.raises(CallInvalid, match="expected requires_grad="):
                    gradients(loaded, x, names)
                continue
            for found, expected in zip(gradients(loaded, x, names), gradients(module, x, names), strict=True):
                assert (found is None) == (expected is None), (target, names)
                if expected is not None:
                    assert found.requires_grad == expected.requires_grad
                    torch.testing.assert_close(found, expected)


def asks_beside_a_branch_on_values(m, x):
    return reads_a_parameter(m, x) if x.isfinite().all() else x


def test_code_that_asks_of_a_parameter_is_served_in_either_grad_mode(tmp_path):
    module, x = exported(tmp_path, asks_beside_a_branch_on_values, "ab"), torch.randn(3, 4)
    loaded = aotexport_runtime.load(tmp_path / "b")
    for mode in (True, False):
        with torch.set_grad_enabled(mode):
            torch.testing.assert_close(loaded(x), module(x))


class Distance(torch.autograd.Function):
    """Branches on values, and on what autograd records of those that it computes, as kernels of Gaussian processes."""

    @staticmethod
    def forward(ctx, x, w):
        scaled = x / w
        if x.isfinite().all() and not scaled.requires_grad:
            scaled = scaled * torch.tensor(2.0)
        ctx.save_for_backward(w)
        return scaled

    @staticmethod
    def backward(ctx, grad):
        (w,) = ctx.saved_tensors
        return grad / w * torch.tensor(2.0), None


def test_nothing_requires_grad_within_the_forward_of_a_custom_function(tmp_path):
    module, x = exported(tmp_path, lambda m, x: Distance.apply(m.a(x), m.b.bias), "ab"), torch.randn(3, 4)
    loaded = aotexport_runtime.load(tmp_path / "b")
    for got, expected in zip(gradients(loaded, x, "ab"), gradients(module, x, "ab"), strict=True):
        assert (got is None) == (expected is None)
        torch.testing.assert_close(got, expected)


def test_layers_frozen_for_serving_are_served_where_only_gradients_depend_on_them(tmp_path):
    module = exported(tmp_path, reentrant, "ab")
    loaded = aotexport_runtime.load(tmp_path / "b").eval()
    require(loaded, "")
    x = torch.randn(3, 4)
    with torch.no_grad():
        torch.testing.assert_close(loaded(x), module(x))
    assert refusal(CallInvalid, loaded, x) == (
        "the call does not fit program `infer`:\n"
        "  - `a.weight` and `a.bias`: expected requires_grad=True of one of them, as at capture, since gradients of "
        "the model depend on it; got False. Set it so, or export the model with it as it is now"
    )


def replaced(module):
    module.a = nn.Linear(4, 4)


def hooked(module):
    module.b.register_forward_hook(lambda module, args, result: result * 2)


@pytest.mark.parametrize(
    ("change", "names", "serves"), [(replaced, "b", True), (replaced, "ab", False), (hooked, "b", True)]
)
def test_changed_layers_count_among_what_requires_grad(tmp_path, change, names, serves):
    module, x = exported(tmp_path, reentrant, "b"), torch.randn(3, 4)
    loaded = aotexport_runtime.load(tmp_path / "b")
    change(loaded)
    if not serves:
        with pytest.raises(CallInvalid, match="that was put in requires grad"):
            gradients(loaded, x, names)
        return
    change(module)
    module.load_state_dict(loaded.state_dict())
    for got, expected in zip(gradients(loaded, x, names), gradients(module, x, names), strict=True):
        assert (got is None) == (expected is None)
        torch.testing.assert_close(got, expected)


def test_adapters_before_a_checkpoint_that_recorded_nothing_are_refused(tmp_path):
    exported(tmp_path, reentrant, "b")
    loaded = aotexport_runtime.load(tmp_path / "b")
    adapters.add_lora(loaded, ["a"], r=2)
    with torch.no_grad():
        loaded.eval()(torch.randn(3, 4))
    assert refusal(CallInvalid, loaded.train(), torch.randn(3, 4)) == (
        "the call does not fit program `train`:\n"
        "  - an adapter or a submodule that was put in requires grad, and at capture a part of the model recorded no "
        "gradients because nothing before it required grad (a reentrant checkpoint does so). Export the model with a "
        "parameter or argument before that part that requires grad"
    )


def test_bundle_of_a_loaded_bundle_depends_on_the_same_layers(tmp_path):
    exported(tmp_path, reads_a_parameter, "ab")
    inner = aotexport_runtime.load(tmp_path / "b")
    whole = nn.Sequential(nn.Linear(4, 4), inner)
    for number, module in enumerate((inner, whole)):
        aotexport.export(module, (torch.randn(3, 4),), output=tmp_path / str(number), verify=False)
        loaded = aotexport_runtime.load(tmp_path / str(number))
        loaded.get_submodule("1" if number else "").get_submodule("a").requires_grad_(False)
        with pytest.raises(CallInvalid, match=r"a.weight`: expected requires_grad=True, as at capture"):
            loaded(torch.randn(3, 4))
