"""A run of the model's own code leaves the model, the example and the random generator as they were."""

import contextlib

import pytest
import torch
from torch import nn

from aotexport.eager.run import eager_run
from aotexport.model.call import example_call
from aotexport.model.state import collect_state

OUTSIDE = torch.zeros(2)


class Changing(nn.Module):
    """Changes all that a call can."""

    def __init__(self, fails):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.register_buffer("seen", torch.zeros(2))
        self.calls, self.fails = 0, fails

    def forward(self, x):
        self.calls += 1
        self.seen += 1
        OUTSIDE.add_(1)
        x.add_(torch.rand(2))
        self.grads = torch.is_grad_enabled()
        self.modes = self.training
        (self.weight * 2).sum().backward()
        if self.fails:
            raise ValueError("of the model")
        return x, self.seen


@pytest.fixture(params=[False, True], ids=["returns", "raises"])
def ran(request):
    """Return a function that runs the model, and returns it with what a run gave."""

    def run(mode="eval", **options):
        model = Changing(request.param)
        x = torch.ones(2)
        call, state = example_call(model, (x,), {}, None), collect_state(model)
        given = None
        failing = pytest.raises(ValueError, match="of the model") if request.param else contextlib.nullcontext()
        with failing, eager_run(call, state, mode, **options) as runs:
            try:
                given = runs()
            finally:
                assert not torch.equal(runs.tensors[0], x)
                assert not isinstance(runs.snapshot.changes()[-1], str)
        return model, x, given

    OUTSIDE.zero_()
    return run


def test_everything_is_as_it_was(ran):
    before = torch.get_rng_state()
    model, x, _ = ran(outside=True)
    assert (model.calls, model.training, hasattr(model, "grads")) == (0, True, False)
    assert model.weight.grad is None
    for tensor, value in ((x, 1), (model.seen, 0), (model.weight, 1), (OUTSIDE, 0)):
        assert torch.equal(tensor, torch.full((2,), float(value)))
    assert torch.equal(torch.get_rng_state(), before)


def test_attributes_are_kept_where_that_is_asked_for(ran):
    model, *_ = ran(keeps_attributes=True)
    assert (model.calls, model.modes, model.training) == (1, False, True)
    assert torch.equal(model.seen, torch.zeros(2))
