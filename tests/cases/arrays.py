"""NumPy arrays: converted, computed with, changed and returned."""

from typing import Any

import numpy as np
import torch
from torch import nn

from tests.cases import case, slow_case
from tests.cases.dynamic import BATCH


def ramp(*shape: int, dtype: Any = np.float32) -> Any:
    return np.linspace(-1, 1, int(np.prod(shape))).reshape(shape).astype(dtype)


@case(lambda: (ramp(4, 3), {"rows": [np.array([0, 2])]}), dynamic_shapes=({0: BATCH}, None))
class ArraysConvertedAndReturned(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)

    def forward(self, x, options):
        hidden = self.linear(torch.from_numpy(x))
        copied = torch.tensor(x, dtype=torch.float64), torch.asarray(x, copy=True), torch.as_tensor(x).exp()
        return hidden, hidden.detach().numpy(), hidden[options["rows"][0]], copied


@case(lambda: (ramp(3), ramp(3), [ramp(2)]))
def arrays_changed_by_the_call(x, y, given):
    x += 1
    torch.from_numpy(y).mul_(2)
    first = x[0]
    x[0] = 5
    np.add(given[0], first, out=given[0])
    given.append(y)
    return x, given[0], torch.as_tensor(y)[1:], (x + first).reshape(3, 1)


@case(lambda: (ramp(3, 4), np.arange(4)))
def computed_by_functions_of_numpy(x, steps):
    total = x.sum()
    total += 1
    flat = x.flatten()
    flat += np.float32(2)
    rows = np.where(x > 0, np.sqrt(np.abs(x)), x * steps)
    return (
        flat,
        np.concatenate([x, rows]).T,
        np.stack([x.mean(axis=0) / total, steps / 3]),
        x[1:, ::2],
        rows.astype(np.float16),
    )


@slow_case(lambda: (torch.linspace(0, 1, 6).reshape(2, 3), ramp(3)))
def arrays_of_tensors(x, shift):
    array = x.numpy()
    array[0] = shift
    return array, array, x.t().numpy(), torch.from_numpy(array - shift)
