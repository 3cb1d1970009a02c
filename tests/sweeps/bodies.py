"""`hop_db` and `autograd_function_db`: operators that call functions, and backward passes written by hand."""

import itertools

from torch.testing._internal.autograd_function_db import autograd_function_db
from torch.testing._internal.hop_db import hop_db

from tests.sweeps.operators import elsewhere, items_of
from tests.sweeps.sample import Items

EXCLUDED = elsewhere(hop_db) | {
    "NumpyExpMarkDirtyAutogradFunction int64": "NumPy refuses to write floats to integers, in eager execution too",
    "register_hook.simple int64": "the collection asks for gradients of integers",
    "while_loop.simple int64": "the loop changes a dtype, which torch refuses in eager execution too",
}
"""Operators that are not run, with the reason."""


def items() -> Items:
    """Return the operators and functions, by name, dtype and whether gradients are asked for."""
    return items_of(itertools.chain(hop_db, autograd_function_db))
