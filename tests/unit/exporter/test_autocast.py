"""Which values of a forward graph keep their dtypes under autocast, beside what eager gives under it."""

import pytest
import torch
from torch import nn
from torch.fx import GraphModule, Interpreter
from torch.fx.experimental.proxy_tensor import make_fx  # noqa: TID251

from aotexport.capture.trace.autocast import leaves_dtypes_alone
from aotexport.model.call import example_call


class Branches(nn.Module):
    """Values that autocast changes, that it leaves, and both joined."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(10, 8)
        self.linear = nn.Linear(8, 8)
        self.norm = nn.LayerNorm(8)

    def forward(self, ids, x, scale):
        words = self.norm(self.table(ids) + x)
        narrow = self.linear(words)
        return (
            narrow.relu(),
            words + narrow,
            narrow * 2,
            narrow * scale,
            narrow.double() + x,
            narrow.argmax(-1),
            narrow.to(torch.float16),
            narrow @ narrow.transpose(-1, -2),
            torch.cat([words, narrow]),
            narrow.sum() * words,
            words.to(torch.bfloat16) + narrow,
            words.chunk(2)[1],
            narrow.chunk(2)[1],
            nn.functional.scaled_dot_product_attention(words, narrow, words),
            nn.functional.mse_loss(narrow, words),
        )


INPUTS = (torch.arange(6).reshape(2, 3), torch.ones(2, 3, 8), torch.tensor(2.0))


class DtypesOf(Interpreter):
    """Runs a graph, keeping the dtype of each value."""

    def __init__(self, graph: GraphModule):
        super().__init__(graph)
        self.dtypes = {}

    def run_node(self, n):
        value = super().run_node(n)
        if isinstance(value, torch.Tensor):
            self.dtypes[n] = value.dtype
        return value


@pytest.fixture(scope="module")
def graph():
    model = Branches()
    return make_fx(lambda *inputs: model(*inputs), pre_dispatch=True, tracing_mode="fake", _allow_non_fake_inputs=True)(
        *INPUTS
    )


@pytest.mark.parametrize("under", [False, True], ids=["captured without", "captured under"])
def test_value_said_to_keep_its_dtype_has_it_with_and_without_autocast(graph, under):
    call = example_call(graph, INPUTS, None, None)
    dtypes = []
    for enabled in (under, not under):
        runner = DtypesOf(graph)
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            runner.run(*INPUTS)
        dtypes.append(runner.dtypes)
    kept = {node for node in dtypes[0] if leaves_dtypes_alone(call, [node])}

    changed = {node for node in dtypes[0] if dtypes[0][node] != dtypes[1][node]}
    assert not kept & changed
    assert changed
    assert len(kept) > len(changed)
