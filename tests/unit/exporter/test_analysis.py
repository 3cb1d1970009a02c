"""What AOTAutograd sees of a forward graph does not depend on the operators that its analysis leaves out."""

import pytest
import torch
from torch import nn
from torch.export import Dim

from aotexport.capture.forward import capture_forward
from aotexport.capture.functional import capture as functional
from aotexport.capture.functional.capture import capture_functional_graph
from aotexport.capture.functional.retrace import hidden_values
from aotexport.model.programs import Example, Program, choose_programs
from aotexport.model.state import collect_state


def chain(w, x):
    return ((x * w).tanh() + w) * 2


def views_of_new_values(w, x):
    value = (x * w + 1).exp()
    return value, value.view(-1), value[0], value.detach(), value.t() @ (value * 2).neg()


def products(w, x):
    return torch.relu((x @ w) @ w + 1), (x.mm(w) * 2).t()


def mutated_input(w, x):
    y = (x + 1) * 2
    x.add_(y)
    return x.view(-1), y * w


def mutated_value(w, x):
    y = (x + 1) * 2
    y.view(-1).mul_((w * w).sum())
    return y


def integers(w, x):
    count = (x > 0).long() * 2 + 1
    return count, (count * w).neg().exp()


def returned_as_it_is(w, x):
    y = (x * 2 + 1).exp()
    return x, w, y, y.contiguous(), y.expand(2, 4, 4)


def layers(w, x):
    heads = nn.functional.layer_norm(x @ w, x.shape[-1:]).view(x.shape[0], 2, -1).transpose(0, 1)
    attended = nn.functional.scaled_dot_product_attention(heads, heads, heads)
    first, second = attended.reshape(x.shape[0], -1).split(2, 1)
    return torch.cat([first, second], 1).sum(0), first, second.detach(), x.shape[0] * 2


def without_gradients(w, x):
    return (x * w).sign() + 1, (x @ w).argmax(1), torch.zeros_like(x @ w).add(1)


def running_statistics(w, x):
    nn.functional.batch_norm(x @ w, x[0], x[1].abs(), training=True)
    return x + 1


class Of(nn.Module):
    def __init__(self, function) -> None:
        super().__init__()
        self.function = function
        self.w = nn.Parameter(torch.ones(4, 4))

    def forward(self, x):
        return self.function(self.w, x)


FUNCTIONS = [chain, views_of_new_values, products, mutated_input, mutated_value, integers, returned_as_it_is]
FUNCTIONS += [layers, without_gradients, running_statistics]
BATCH = {"x": {0: Dim("batch", min=2)}}


def seen(function, *, grad, sizes):
    """Return what AOTAutograd knows of a function's inputs and outputs, and its graph."""
    module = Of(function)
    (spec,) = choose_programs(module, Example((torch.ones(4, 4),), {}, sizes), Program("program", grad=grad))
    state = collect_state(module)
    captured = capture_functional_graph(capture_forward(spec.call, state, grad=grad), grad=grad)
    found = captured.metadata
    outputs = [(o.output_type, o.base_idx, o.requires_grad, o.dynamic_dims) for o in found.output_info]
    tangents = [(str(t.shape), str(t.stride()), t.dtype) for t in found.traced_tangents]
    return found.input_info, outputs, found.num_intermediate_bases, tangents, str(captured.module.graph)


@pytest.mark.parametrize(
    ("function", "sizes", "grad"),
    [
        *((function, None, True) for function in FUNCTIONS),
        (returned_as_it_is, None, False),
        *(pytest.param(each, None, False, marks=pytest.mark.slow) for each in (mutated_value, running_statistics)),
        (layers, BATCH, True),
        *(pytest.param(each, BATCH, True, marks=pytest.mark.slow) for each in (products, running_statistics)),
    ],
)
def test_analysis_without_hidden_values_sees_the_same(function, sizes, grad, monkeypatch):
    short = seen(function, grad=grad, sizes=sizes)
    monkeypatch.setattr(functional, "hidden_values", lambda *_, **__: set())
    assert short == seen(function, grad=grad, sizes=sizes)


def test_analysis_of_a_chain_leaves_its_operators_out():
    module = Of(chain)
    (spec,) = choose_programs(module, (torch.ones(4, 4),), Program("program", grad=True))
    forward = capture_forward(spec.call, collect_state(module))
    assert len(hidden_values(forward, {}, grad=True)) == 3
