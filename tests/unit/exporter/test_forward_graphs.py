"""Forward graphs of several programs share the tensors that calls make."""

import torch
from torch import nn

from aotexport.capture.programs.forward_graphs import ForwardGraphs
from aotexport.model.programs import choose_programs
from aotexport.model.state import collect_state


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
