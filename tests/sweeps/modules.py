"""`module_db`: every module of `torch.nn` in torch's test collection, in train mode and in eval mode."""

import random
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.testing._internal.common_modules import module_db

from tests.sweeps.sample import Items, Sample, spread

SAMPLES = 6
PROGRAMS = {"train": ("train",), "eval": ("eval-joint", "infer")}

EXCLUDED = dict.fromkeys(
    ("nn.FractionalMaxPool2d", "nn.FractionalMaxPool3d"),
    "the collection makes the random samples in another dtype than the input",
)
"""Modules that are not run, with the reason."""


def items() -> Items:
    """Return the modules, by name and mode."""
    return {f"{info.name} {mode}": partial(_samples, info, mode) for info in module_db for mode in PROGRAMS}


def _samples(info: Any, mode: str) -> Iterator[Sample]:
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    training = mode == "train"
    made = info.module_inputs_func(info, device="cpu", dtype=torch.float32, requires_grad=True, training=training)
    for inputs in spread(list(made), SAMPLES):
        build, call = inputs.constructor_input, inputs.forward_input
        module = info.module_cls(*build.args, **build.kwargs).train(training)
        if info.is_lazy:
            module(*call.args, **call.kwargs)
        yield Sample(module, tuple(call.args), dict(call.kwargs), {"programs": PROGRAMS[mode]})
