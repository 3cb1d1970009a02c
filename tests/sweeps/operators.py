"""`op_db`: every operator of torch's test collection, in float32 and one other dtype, with and without gradients."""

import random
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.testing._internal import common_methods_invocations

from tests.sweeps.sample import Items, Sample, spread

OTHER_DTYPES = (torch.complex64, torch.int64, torch.bfloat16, torch.float64, torch.bool)
SAMPLES = 4

# Seeds are set outside of the recorded calls; those of the collection's own wrapper would stand inside.
common_methods_invocations.wrapper_set_seed = lambda op, *args, **kwargs: op(*args, **kwargs)


def name_of(info: Any) -> str:
    """Return the name of an operator with that of its variant."""
    return f"{info.name}.{info.variant_test_name}" if info.variant_test_name else info.name


def elsewhere(infos: Iterable[Any]) -> dict[str, str]:
    """Return the operators that are not run because they are for other devices, with that reason."""
    return {
        name_of(info): "is in the collection for other devices alone"
        for info in infos
        if not info.supported_dtypes("cpu")
    }


EXCLUDED = elsewhere(common_methods_invocations.op_db) | {
    **{
        name_of(info): "compiles for CUDA and ROCm alone"
        for info in common_methods_invocations.op_db
        if info.name.startswith("jiterator")
    },
    **dict.fromkeys(
        ("empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided"),
        "returns memory as it finds it",
    ),
    **dict.fromkeys(("resize_", "resize_as_"), "grows into memory as it finds it"),
    "linalg.ldl_solve complex64": "what LAPACK computes for pivots that are not of a factorisation is not defined",
}
"""Operators that are not run, with the reason."""


def items() -> Items:
    """Return the operators, by name, dtype and whether gradients are asked for."""
    return items_of(common_methods_invocations.op_db)


def items_of(infos: Iterable[Any]) -> Items:
    """Return the items of operators that torch's test collections describe."""
    found: Items = {}
    for info in infos:
        for dtype in _dtypes(info):
            label = f"{name_of(info)} {str(dtype).removeprefix('torch.')}"
            found[label] = partial(_samples, info, dtype, False)
            if info.supports_autograd and dtype in info.supported_backward_dtypes("cpu"):
                found[f"{label} grad"] = partial(_samples, info, dtype, True)
    return found


def _dtypes(info: Any) -> list[torch.dtype]:
    supported = info.supported_dtypes("cpu")
    others = [dtype for dtype in OTHER_DTYPES if dtype in supported]
    return [*([torch.float32] if torch.float32 in supported else []), *others[:1]]


def _samples(info: Any, dtype: torch.dtype, grad: bool) -> Iterator[Sample]:
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    for inputs in spread(list(info.sample_inputs("cpu", dtype, requires_grad=grad)), SAMPLES):
        # A function that is passed belongs to the code.
        functions = {name: value for name, value in inputs.kwargs.items() if callable(value)}
        others = {name: value for name, value in inputs.kwargs.items() if name not in functions}
        yield Sample(_call(info, functions), (inputs.input, *inputs.args), others)


def _call(info: Any, functions: dict[str, Any]) -> Any:
    def call(*args: Any, **kwargs: Any) -> Any:
        return info(*args, **kwargs, **functions)

    return call
