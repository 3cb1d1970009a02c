"""What other ways of capture than the direct one lose, and what switching modes changes: never lost in silence."""

import pytest
import torch
from torch import nn

import aotexport
from tests.models import module


class AsksForSize(nn.Module):
    """Code that `torch.export` and Dynamo can follow for all sizes, and a direct trace for the example's alone."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(5, 5)
        self.register_buffer("seen", torch.zeros(5))

    def forward(self, x):
        rows, _ = map(int, x.shape)
        hidden = self.linear(x)
        return self.further(hidden * hidden.reshape(rows * 5)[: rows * 2].sum())

    def further(self, hidden):
        return hidden


class RegistersHook(AsksForSize):
    def further(self, hidden):
        hidden.register_hook(lambda grad: grad.clamp(-0.01, 0.01))
        return hidden * 2


class ReplacesBuffer(AsksForSize):
    def further(self, hidden):
        self.seen = self.seen + hidden.detach().mean(0)
        return hidden + self.seen


class LeavesGradientsOff(AsksForSize):
    def further(self, hidden):
        torch.set_grad_enabled(False)
        return hidden * 2


def test_size_is_followed_where_nothing_is_lost(load):
    model, sizes = AsksForSize(), ({0: torch.export.Dim("batch", min=2)},)
    loaded = load(model, torch.randn(4, 5), dynamic_shapes=sizes, programs=("infer",), target="auto").eval()
    x = torch.randn(6, 5)
    assert torch.allclose(loaded(x), model.eval()(x))


@pytest.mark.parametrize("model", [RegistersHook, ReplacesBuffer, LeavesGradientsOff])
def test_size_is_not_followed_where_an_effect_would_be_lost(tmp_path, model):
    batch = torch.export.Dim("batch", min=2)
    with pytest.raises(aotexport.ExportFailed, match="`batch`, and the model works only for size 4"):
        aotexport.export(
            model(), (torch.randn(4, 5),), output=tmp_path / "bundle", dynamic_shapes=({0: batch},), programs=("train",)
        )


class Merging(nn.Module):
    """A low-rank update that `eval` merges into the weight."""

    def __init__(self):
        super().__init__()
        self.base = nn.Linear(4, 4)
        self.down, self.up = nn.Parameter(torch.randn(1, 4)), nn.Parameter(torch.randn(4, 1))
        self.merged = False

    def train(self, mode=True):
        super().train(mode)
        if mode == self.merged:
            self.base.weight.data += (-1 if mode else 1) * self.up.data @ self.down.data
            self.merged = not mode
        return self

    def forward(self, x):
        return self.base(x) if self.merged else self.base(x) + x @ self.down.T @ self.up.T


def test_mode_that_changes_weights_is_refused_and_leaves_them(tmp_path):
    model = Merging()
    before = model.base.weight.clone()
    with pytest.raises(aotexport.ExportFailed) as raised:
        aotexport.export(model, (torch.randn(2, 4),), output=tmp_path / "bundle")
    assert str(raised.value) == (
        "`eval()` of the model changes its `base.weight`, and a bundle has one set of tensors for all modes. Export "
        "the programs of one mode, with the model in that mode (`model.eval()`, then `programs=('infer',)`)"
    )
    assert torch.equal(model.base.weight, before)
    assert model.training
    assert not model.merged


class Freezing(nn.Sequential):
    """Leaves its norm in eval mode, and its first layer frozen, once `train` has been called."""

    def train(self, mode=True):
        super().train(mode)
        self[1].eval()
        self[0].weight.requires_grad_(False)
        return self


@pytest.mark.parametrize(("frozen", "what"), [(False, "leaves `1` in the other mode"), (True, "freezes `0.weight`")])
def test_mode_that_the_own_train_would_not_leave_is_refused(tmp_path, frozen, what):
    model = Freezing(nn.Linear(4, 4), nn.BatchNorm1d(4))
    model[1].training = not frozen
    with pytest.raises(aotexport.ExportFailed) as raised:
        aotexport.export(model, (torch.randn(2, 4),), output=tmp_path / "bundle", programs=("train",))
    assert str(raised.value) == (
        f"`train()` of the model {what}, and that of a loaded bundle would not. Call `.train()` on the model in the "
        "model file, or export the programs of one mode"
    )
    assert model[1].training is not frozen
    assert model[0].weight.requires_grad


class Switching(nn.Linear):
    """Says in its own `eval` what to do, and asks for no mode."""

    factor = 1.0

    def eval(self):
        self.factor = 2.0
        return super().eval()

    def forward(self, x):
        return super().forward(x) * self.factor


def test_own_eval_is_what_the_program_without_gradients_does(load):
    model, x = Switching(4, 4), torch.randn(2, 4)
    loaded = load(model, x, target="auto")
    assert torch.allclose(loaded(x), model(x))
    with torch.no_grad():
        assert torch.allclose(loaded.eval()(x), model.eval()(x))


def reads_the_gradient(self, x):
    return x * 2 if self.weight.grad is None else x


def drops_the_gradient(self, x):
    self.weight.grad = None
    return x * self.weight


def uses_gradients(step):
    return module(lambda self, x: self.step(self, x), weight=nn.Parameter(torch.ones(3)), step=step)


@pytest.mark.parametrize(
    ("step", "message"),
    [
        (reads_the_gradient, "the model reads `Tensor.grad`, the gradient that earlier passes left"),
        (drops_the_gradient, "the model sets `Tensor.grad`, the gradient that earlier passes left"),
    ],
)
def test_model_that_uses_accumulated_gradients_is_refused(tmp_path, step, message):
    line = step.__code__.co_firstlineno + 1
    with pytest.raises(aotexport.ExportFailed, match=f"test_what_traces_lose.py:{line}: in {step.__name__}: {message}"):
        aotexport.export(uses_gradients(step), (torch.randn(2, 3),), output=tmp_path / "bundle", verify=False)
