"""Whether calls depend on attributes that earlier calls have stored: told by few calls where these change no more."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from aotexport.eager.python_state import depends_on
from aotexport.model.programs import Example, choose_programs
from aotexport.model.state import collect_state


class Storing(nn.Module):
    """Counts its calls in an iterator, which is no state that a bundle could keep."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.kind, self.memory, self.shapes = None, None, {}
        self.calls = iter(range(100))

    def forward(self, x):
        next(self.calls)
        return self.stored(x)


class Kind(Storing):
    def stored(self, x):
        self.kind, self.shapes[x.shape] = "regression", "".join(("a", "b"))
        return self.linear(x)


class Memory(Storing):
    def stored(self, x):
        if self.memory is None:
            self.memory = torch.zeros(1)
        self.memory.data += 1  # leaves the version
        return x if self.memory > 5 else self.linear(x)


class Resized(Storing):
    def stored(self, x):
        if self.memory is None:
            self.memory = torch.zeros(1)
        self.memory.resize_(len(self.memory) + 1)
        return x if len(self.memory) > 6 else self.linear(x)


@pytest.mark.parametrize(("model", "depends", "calls"), [(Kind, False, 3), (Memory, True, 7), (Resized, True, 7)])
def test_calls_are_repeated_as_long_as_they_change_something(model, depends, calls):
    module = model().eval()
    (spec,) = choose_programs(module, Example((torch.ones(3),), {}, None), ("infer",), ())
    assert depends_on(spec, collect_state(module)) is depends
    assert next(module.calls) == calls
