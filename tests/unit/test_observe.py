"""What counts as the same result."""

from __future__ import annotations

import pytest
import torch

from aotexport_runtime.observe import Observation, compare


def seen(tensor: torch.Tensor) -> Observation:
    observation = Observation()
    observation.tensor("output", tensor)
    return observation


@pytest.mark.parametrize(
    ("dtype", "factor", "agrees"),
    [
        (torch.float32, 1 + 1e-6, True),
        (torch.float32, 1 + 1e-3, False),
        (torch.float64, 1 + 1e-8, True),
        (torch.float64, 1 + 1e-6, False),
    ],
)
def test_norm_of_a_large_tensor_is_compared_by_the_tolerance_of_the_tensor(
    dtype: torch.dtype, factor: float, agrees: bool
) -> None:
    tensor = torch.linspace(1, 2, 10_000, dtype=torch.float64)
    differences = compare(seen(tensor.to(dtype)), seen((tensor * factor).to(dtype)))
    assert {difference.name: difference.agrees for difference in differences} == {
        "output norm": agrees,
        "output": agrees,
    }
