"""Whether calls depend on attributes that earlier calls have stored: told by few calls where these change no more."""

import pytest
import torch
from torch import nn

from aotexport.eager.python_state import depends_on
from aotexport.eager.run import shorter_call
from aotexport.model.call import example_call
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
        return self.stored(x)  # type: ignore[operator]


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


class Attention(nn.MultiheadAttention):
    """Torch's fast path, which no trace takes, passes it over."""

    seen = 0

    def forward(self, query, *args, **kwargs):
        self.seen += 1
        return (query if self.seen > 3 else -query), None


class Attended(Storing):
    def __init__(self):
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(4, 2, 4, batch_first=True)
        self.layer.self_attn = Attention(4, 2, batch_first=True)

    def stored(self, x):
        return self.layer(torch.eye(2, 4)[None])


@pytest.mark.parametrize(
    ("model", "depends", "calls"), [(Kind, False, 3), (Memory, True, 7), (Resized, True, 7), (Attended, True, 7)]
)
def test_calls_are_repeated_as_long_as_they_change_something(model, depends, calls):
    module = model().eval()
    (spec,) = choose_programs(module, Example((torch.ones(3),), {}, None), ("infer",), ())
    assert depends_on(spec, collect_state(module)) is depends
    assert next(module.calls) == calls


def test_shorter_call_keeps_the_order_of_axes_and_is_none_for_shared_memory():
    rows, x = torch.export.Dim("rows", max=64), torch.randn(3, 9, requires_grad=True)
    call = example_call(lambda x, y: x + y, (x.detach().t().requires_grad_(), torch.ones(9, 3)), None, ({0: rows},) * 2)
    shorter = shorter_call(call)
    assert shorter is not None
    assert [(leaf.shape, leaf.stride(), leaf.requires_grad) for leaf in shorter.args] == [
        ((4, 3), (1, 4), True),
        ((4, 3), (3, 1), False),
    ]
    torch.testing.assert_close(shorter.args[0], x[:, :4].t(), rtol=0, atol=0)
    shared = torch.ones(9, 3)
    assert shorter_call(example_call(lambda x, y: x + y, (shared, shared[:]), None, ({0: rows},) * 2)) is None
    assert shorter_call(example_call(lambda x, y: x + y, (shared[:4], x), None, ({0: rows}, None))) is None
