"""Models whose code asks whether autograd records a value, or that switch gradients on themselves."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from aotexport_runtime import CallInvalid


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, 4))


class Branching(Scaled):
    def forward(self, x):
        y = x * self.weight
        return y + 1 if y.requires_grad else y * 5


class Answering(Scaled):
    def forward(self, x):
        y = x * self.weight
        with torch.enable_grad():
            own, taken = self.weight * 3, y * 2
        facts = own.requires_grad, taken.requires_grad, y.is_leaf, y.grad_fn is None, x.requires_grad
        return y.detach(), own.detach(), facts


class Hooked(Scaled):
    def forward(self, x):
        y = x * self.weight
        if y.requires_grad:
            y.register_hook(lambda grad: grad * 2)
        return y.sin()


class Checkpointed(Scaled):
    def forward(self, x):
        y = x * self.weight
        return checkpoint(torch.sin, y, use_reentrant=False) if y.requires_grad else y.sin()


class Recording(Scaled):
    def forward(self, x):
        y = (x * self.weight).tanh()
        with torch.enable_grad():
            return y * self.weight


MODES = [(training, grad) for training in (True, False) for grad in (True, False)]
OTHER_GRAD_MODE = [(True, False), (False, True)]
"""Train mode without gradients, eval mode with gradients."""


@pytest.mark.parametrize(
    ("kind", "refused"),
    [(Branching, OTHER_GRAD_MODE), (Answering, OTHER_GRAD_MODE), (Hooked, [(False, True)]), (Checkpointed, [])],
)
def test_code_that_reads_history_gets_eagers_answer_or_the_call_is_refused(load, kind, refused):
    module = kind()
    bundle = load(module, torch.ones(3, 4), target="auto")
    for training, grad in MODES:
        x = torch.randn(3, 4)
        with torch.set_grad_enabled(grad):
            if (training, grad) in refused:
                with pytest.raises(CallInvalid, match=f"is_grad_enabled\\(\\) to be {training}, as at capture"):
                    bundle.train(training)(x)
                continue
            expected, got = module.train(training)(x), bundle.train(training)(x)
        torch.testing.assert_close(got, expected)
        if isinstance(expected, torch.Tensor):
            assert got.requires_grad == expected.requires_grad


@pytest.mark.parametrize("target", ["auto", "portable"])
def test_region_that_records_in_eval_mode_gives_all_gradients_under_the_callers_grad_mode(load, target):
    module = Recording()
    bundle = load(module, torch.ones(3, 4), target=target)
    assert bundle.bundle.program("infer").functional is None
    gradients = []
    for each in (module.eval(), bundle.eval()):
        x = torch.ones(3, 4, requires_grad=True)
        each(x).sum().backward()
        gradients.append([x.grad, each.weight.grad])
    torch.testing.assert_close(*gradients)
