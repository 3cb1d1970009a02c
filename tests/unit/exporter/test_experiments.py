"""A second trace tells what a program is fixed to: graphs are compared as a whole."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from aotexport.capture.forward import capture_forward
from aotexport.model.call import example_call
from aotexport.model.state import collect_state

LAYERS = 20


class Long(nn.Module):
    """A value whose dtype autocast changes, what is made of that dtype, and many operators after it."""

    def __init__(self, made: Callable[[torch.Tensor, torch.dtype], torch.Tensor]) -> None:
        super().__init__()
        self.linear, self.made = nn.Linear(4, 4), made

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        y = self.made(y, y.dtype)
        for _ in range(LAYERS):
            y = y.tanh()
        return y


def with_mask(y: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return y + torch.zeros(4, dtype=dtype)


def with_unused_mask(y: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    torch.zeros(4, dtype=dtype)
    return y


def unless_wide(y: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return y if dtype == torch.float64 else y * 2


def narrow_by_another_operator(y: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return y.exp() if dtype == torch.bfloat16 else y.sin()


@pytest.mark.parametrize(
    ("made", "is_fixed"),
    [(with_mask, True), (with_unused_mask, True), (unless_wide, False), (narrow_by_another_operator, True)],
)
def test_program_is_fixed_to_autocast_where_a_trace_under_it_differs(made, is_fixed):
    module = Long(made)
    captured = capture_forward(example_call(module, (torch.ones(2, 4),), {}, None), collect_state(module))
    assert ("autocast" in captured.effects.reads) is is_fixed
