"""Small random programs: a loaded bundle gives eager's values and gradients."""

from collections.abc import Callable
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st

import aotexport
from aotexport_runtime import load
from tests.property.profile import exported

ROWS, COLUMNS = 3, 4
Step = tuple[str, int, int]

UNARY: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "sin": torch.sin,
    "tanh": torch.tanh,
    "relu": torch.relu,
    "clamp": lambda x: x.clamp(-1, 0.5),
    "scale": lambda x: x * 0.5 + 1,
    "sum_keeping": lambda x: x.sum(-1, keepdim=True).expand_as(x),
    "softmax": lambda x: x.softmax(-1),
    "turn_twice": lambda x: x.mT.contiguous().mT,
    "flip_flat": lambda x: x.reshape(-1).flip(0).view(x.shape),
    "roll_rows": lambda x: torch.cat([x[1:], x[:1]]),
    "halves": lambda x: torch.cat(x.chunk(2, dim=1)[::-1], dim=1),
    "first_row": lambda x: x[0].unsqueeze(0).expand(ROWS, COLUMNS),
    "mask": lambda x: torch.where(x > 0, x, x.detach()),
    "in_place": lambda x: x.clone().mul_(2).add_(x),
    "write_a_row": lambda x: x.clone().index_fill(0, torch.tensor([1]), 0.25),
}
BINARY: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "add": torch.add,
    "mul": torch.mul,
    "maximum": torch.maximum,
    "gram": lambda x, y: x @ (y.mT @ y),
    "outer": lambda x, y: (x.mT @ y).softmax(0).sum(0).expand(ROWS, COLUMNS),
}

steps = st.tuples(st.sampled_from([*UNARY, *BINARY]), st.integers(0, 9), st.integers(0, 9))
programs = st.lists(steps, min_size=2, max_size=8)


def run(program: list[Step], x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Compute one value per step from earlier ones, and return the last three."""
    values = [x, y]
    for name, first, second in program:
        a, b = values[-1 - first % len(values)], values[second % len(values)]
        values.append(UNARY[name](a) if name in UNARY else BINARY[name](a, b))
    return tuple(values[-3:])


def inputs(seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(ROWS, COLUMNS, generator=generator).requires_grad_() for _ in range(2)]


def results(function: Callable[..., Any], seed: int) -> list[torch.Tensor | None]:
    """Return outputs, and the gradients of a fixed combination of the differentiable ones."""
    x, y = inputs(seed)
    outputs = function(x, y)
    total = sum((output * torch.linspace(-1, 1, output.numel()).view_as(output)).sum() for output in outputs)
    gradients = torch.autograd.grad(total, [x, y], allow_unused=True)
    return [*(output.detach() for output in outputs), *gradients]


@exported
@given(programs)
def test_loaded_program_gives_the_values_and_gradients_of_eager(tmp_path_factory, program):
    path = tmp_path_factory.mktemp("programs") / "bundle"

    def function(x, y):
        return run(program, x, y)

    aotexport.export(function, tuple(inputs(0)), output=path, verify=False)
    module = load(path, target="portable")
    for seed in (0, 1):
        for expected, got in zip(results(function, seed), results(module, seed), strict=True):
            assert (expected is None) == (got is None)
            if expected is not None and got is not None:
                torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)
