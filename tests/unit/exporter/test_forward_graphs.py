"""Programs share a forward graph only where nothing in the model's code tells them apart."""

import torch
from torch import nn

from aotexport.capture.programs.forward_graphs import ForwardGraphs
from aotexport.model.programs import Program, choose_programs
from aotexport.model.state import collect_state


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).tanh()


class AskingForGradients(Plain):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * (2 if torch.is_grad_enabled() else 1)


TRAIN, INFER = Program("train", mode="train", grad=True), Program("infer", mode="train")


def captured(module, programs=None, **example):
    """Return the forward graphs of the programs of a module."""
    specs = choose_programs(module, {"x": torch.ones(2, 4), **example}, programs)
    graphs = ForwardGraphs(collect_state(module))
    return [graphs.capture(spec) for spec in specs]


def test_forward_graph_of_code_that_does_not_ask_for_gradients_serves_both_programs():
    train, infer = captured(Plain().eval(), [TRAIN, INFER])
    assert train is infer


def test_forward_graph_of_code_that_asks_for_gradients_is_its_own():
    train, infer = captured(AskingForGradients().eval(), [TRAIN, INFER])
    assert train is not infer


def test_forward_graph_of_another_mode_is_its_own():
    train, infer = captured(Plain())
    assert train is not infer


def test_forward_graph_without_gradients_does_not_serve_a_program_with_them():
    infer, train = captured(Plain(), ["infer", "train"])
    assert train is not infer


def test_forward_graph_of_other_arguments_is_its_own():
    other = Program("other", example={"x": torch.ones(2, 4)})
    train, infer = captured(Plain(), ["train", other])
    assert train is not infer


class MakingConstants(nn.Module):
    """Makes tensors in each call, one of which it writes to, and closes over another."""

    OUTSIDE = torch.tensor(2.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        counted = torch.tensor([2.0, 3.0])
        counted += 1
        zeros = torch.tensor(0.0).sign() + torch.tensor(-0.0).copysign(torch.tensor(1.0))
        return nn.functional.dropout(x * torch.tensor(2.0) + torch.tensor(2.0), training=self.training) + (
            counted.sum() + self.OUTSIDE + zeros
        )


def test_constants_that_calls_make_are_held_once_by_their_values():
    module = MakingConstants()
    state = collect_state(module)
    graphs = ForwardGraphs(state)
    for spec in choose_programs(module, {"x": torch.ones(2, 4)}):
        graphs.capture(spec)
    held = [entry.tensor.tolist() for entry in state.entries]
    assert sorted(map(str, held)) == ["-0.0", "0.0", "1.0", "2.0", "2.0", "[2.0, 3.0]"]
